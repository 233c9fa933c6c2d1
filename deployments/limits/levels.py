"""Which limits a request falls under: its key's, from the tier; its project's; its organisation's for the model."""

from __future__ import annotations

from collections.abc import Iterator

from deployments.accounts.tenant import Tenant
from deployments.config.limits import LimitsConfig
from deployments.config.tiers import Allowance
from deployments.limits.base import Kind, Meter


def meters(tenant: Tenant, tier: Allowance, limits: LimitsConfig, model: str | None) -> tuple[Meter, ...]:
    """`model` None leaves out the limits that are a model's own."""
    org, project = tenant.org, tenant.project
    found = [*_meters(f"key:{tenant.id}", f"organization {org} (key {tenant.id})", tier)]
    if (allowance := limits.projects.get(f"{org}/{project}")) is not None:
        found += _meters(f"project:{org}/{project}", f"organization {org} (project {project})", allowance)
    if model is not None and (allowance := limits.orgs.get(org)) is not None:
        found += _meters(f"org:{org}:{model}", f"organization {org}", allowance)
    return tuple(found)


def _meters(name: str, subject: str, allowance: Allowance) -> Iterator[Meter]:
    for kind, limit in (
        (Kind.REQUESTS, allowance.rpm),
        (Kind.TOKENS, allowance.tpm),
        (Kind.CONCURRENT, allowance.max_concurrent),
    ):
        if limit is not None:
            yield Meter(f"{name}:{kind}", kind, limit, subject)
