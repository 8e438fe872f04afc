"""The columns of metrics.jsonl and eval.jsonl; docs/metrics.md is generated from them."""

from typing import NamedTuple


class Column(NamedTuple):
    """One column."""

    unit: str
    meaning: str
    source: str
    """Module of `gac` that computes it."""


STEP, SAMPLING, METHOD, EVAL = "training.step", "rollouts.sampling", "methods", "evaluation"
METRICS: dict[str, Column] = {
    "step": Column("steps", "optimizer steps so far", STEP),
    "mu": Column("", "weight of the demonstration term in the step's gradient", STEP),
    "rollout_loss": Column("", "rollout term before weighting, null without rollouts", STEP),
    "demo_loss": Column("", "demonstration term before weighting, null without them", STEP),
    "demo_nll/SOURCE": Column("nats", "mean negative log-prob per demonstration token", STEP),
    "reward_mean": Column("reward", "mean over all sampled rollouts, with penalties", STEP),
    "reward_mean/SOURCE": Column("reward", "the same for each of several data sources", SAMPLING),
    "reward/TERM": Column("reward", "unweighted mean of each term of a sum", SAMPLING),
    "kl": Column("nats", "mean KL to the reference per rollout token, if measured", STEP),
    "entropy": Column("nats", "mean entropy of the policy per rollout token", STEP),
    "demo_entropy": Column("nats", "the same per demonstration token", STEP),
    "clip_fraction": Column("share", "rollout tokens whose ratio was clipped", STEP),
    "sft_variance": Column("", "the paper's equation 8", STEP),
    "rl_variance": Column("", "the paper's equation 7", STEP),
    "disagreement": Column("", "the paper's equation 9", STEP),
    "grad_norm": Column("", "norm of the gradient before clipping", STEP),
    "lr": Column("", "learning rate", STEP),
    "tokens": Column("tokens", "tokens of the rows, prompts included, over all ranks", STEP),
    "kept_columns": Column("share", "vocabulary columns kept by `loss.gradient_filter`", STEP),
    "dropped_mass": Column("share", "gradient mass that the filter left to its tail", STEP),
    "skipped": Column("steps", "skipped steps so far; see `guards`", STEP),
    "completions/mean_length": Column("tokens", "mean length of the step's rollouts", STEP),
    "completions/clipped_ratio": Column("share", "completions cut off at the limit", SAMPLING),
    "frac_reward_zero_std": Column("share", "prompts whose rewards are all equal", SAMPLING),
    "frac_solved": Column("share", "prompts whose rewards are all at least 1", SAMPLING),
    "frac_unsolved": Column("share", "prompts whose rewards are all below 1", SAMPLING),
    "resampled_prompts": Column("prompts", "replaced because of equal rewards", SAMPLING),
    "sampled_completions": Column("completions", "0 if rollouts are reused", SAMPLING),
    "sampled_tokens": Column("tokens", "sampled tokens, over all ranks", SAMPLING),
    "sampling/mismatch_kl": Column("nats", "KL of the engine to the policy per token", STEP),
    "sampling_seconds": Column("s", "time of sampling, mean over ranks", SAMPLING),
    "reward_seconds": Column("s", "time of the reward, mean over ranks", SAMPLING),
    "completions_per_second": Column("1/s", "sampled completions over their time", SAMPLING),
    "seconds": Column("s", "wall-clock time of the step", "training.trainer"),
    "sampling_share": Column("share", "sampling_seconds / seconds", "training.trainer"),
    "tokens_per_second": Column("1/s", "tokens / seconds", "training.trainer"),
    "reward_dropped": Column("rows", "rows without a reward (`on_error: drop`)", "rewards.base"),
    "reward_EVENT": Column("events", "events of the reward, such as `timeout`", "rewards.base"),
    "mu_star": Column("", "the paper's equation 11, null if the method has none", METHOD),
    "prior": Column("", "the schedule that mu is pulled towards", METHOD),
    "alpha": Column("", "desired weight of SFT, equation 10", METHOD),
    "demos_suspect": Column("0 or 1", "whether the alarm is on; a share with sources", METHOD),
    "trust": Column("", "factor of the gate", METHOD),
    "cosine": Column("", "cosine of both gradients, as the gate or the solver has it", METHOD),
    "z": Column("", "inner product of both gradients over its standard error", METHOD),
    "read_SIGNAL": Column("", "what the signal source measured, before averaging", METHOD),
    "solver_skipped": Column("steps", "steps on which the solver kept its weights", METHOD),
    "reward_slope": Column("", "slope of the mean reward that amft follows", METHOD),
    "entropy_target": Column("nats", "entropy that amft steers to", METHOD),
}
"""Column of metrics.jsonl -> what it is; capitals stand for names. A method of your own can add
columns (`Method.report`)."""
EVALUATION: dict[str, Column] = {
    "step": Column("steps", "optimizer steps before the evaluation", EVAL),
    "accuracy": Column("reward", "mean score of the first task", EVAL),
    "accuracy/TASK": Column("reward", "the same for a split or a further task", EVAL),
    "ci95": Column("reward", "95% interval of `accuracy`: [low, high]", EVAL),
    "pass@K": Column("share", "prompts with a correct answer among K, estimated", EVAL),
    "prompts": Column("prompts", "number of prompts", EVAL),
    "response_length": Column("tokens", "mean length of the answers", EVAL),
    "truncated": Column("share", "answers cut off at the limit", EVAL),
    "seconds": Column("s", "wall-clock time of all tasks", EVAL),
}
"""The same for eval.jsonl; the columns of a further task end with `/TASK`."""
