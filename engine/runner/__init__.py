"""From a StepPlan to a StepResult on one rank: batch packs the slices into tensors, runner drives the model,
sampler and logprobs turn logits into tokens."""
