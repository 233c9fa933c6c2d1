"""Which limits a request falls under: its key's, from the tier; its project's; its organisation's for the model."""

from __future__ import annotations

from collections.abc import Iterator

from deployments.accounts.tenant import Tenant
from deployments.config.limits import LimitsConfig
from deployments.config.tiers import Allowance
from deployments.limits.base import Limit, LimitKind


def limits_of(tenant: Tenant, tier: Allowance, limits: LimitsConfig, model: str | None) -> tuple[Limit, ...]:
    """`tier`: the allowance of the tenant's tier. `model` None leaves out the limits that hold for each model apart."""
    org, project = tenant.org, tenant.project
    found = [*_limits_of_allowance(f"key:{tenant.id}", f"organization {org} (key {tenant.id})", tier)]
    if (allowance := limits.projects.get(f"{org}/{project}")) is not None:
        found += _limits_of_allowance(f"project:{org}/{project}", f"organization {org} (project {project})", allowance)
    if model is not None and (allowance := limits.orgs.get(org)) is not None:
        found += _limits_of_allowance(f"org:{org}:{model}", f"organization {org}", allowance)
    return tuple(found)


def _limits_of_allowance(name: str, subject: str, allowance: Allowance) -> Iterator[Limit]:
    for kind, maximum in (
        (LimitKind.REQUESTS, allowance.rpm),
        (LimitKind.TOKENS, allowance.tpm),
        (LimitKind.CONCURRENT, allowance.max_concurrent),
    ):
        if maximum is not None:
            yield Limit(f"{name}:{kind}", kind, maximum, subject)
