"""The columns of metrics.jsonl and eval.jsonl; docs/reference/index.md lists them."""

from typing import NamedTuple


class Column(NamedTuple):
    """One column, or several that are explained together."""

    unit: str
    meaning: str
    source: str
    """Module of `gac` that computes it."""


END, STEP, METHOD, EVAL = "step_end", "training.step", "methods", "evaluation"
SAMPLING, STATS, TEACHER = "rollouts.sampling", "rollouts.stats", "training.teacher"
METRICS: dict[str, Column] = {
    "step, skipped": Column("steps", "optimizer steps so far; skipped ones (see `guards`)", END),
    "mu": Column("", "weight of the demonstration term in the step's gradient", END),
    "rollout_loss, demo_loss": Column("", "both terms before weighting, null without rows", END),
    "reward_mean": Column("reward", "mean over all sampled rollouts, with penalties", END),
    "reward_mean/SOURCE, reward/TERM": Column(
        "reward", "the same for each data source; unweighted mean of each term of a sum", SAMPLING
    ),
    "kl, entropy": Column(
        "nats", "KL to the reference, if measured, and entropy: means per rollout token", END
    ),
    "kl_standard_error": Column(
        "nats", "of a `kl` that was estimated from `kl_sample_size` rollouts, over rollouts", END
    ),
    "demo_nll/SOURCE": Column("nats", "mean of the demonstrations' mean -log-prob per token", END),
    "demo_weight": Column(
        "", "mean token weight (p or phi) of the demonstrations; null if all weights are 1", END
    ),
    "demo_entropy": Column("nats", "entropy: mean per demonstration token", END),
    "clip_fraction, sampling/frac_corrected": Column(
        "share", "rollout tokens: with a clipped ratio; cut or dropped by `correction`", END
    ),
    "sampling/mismatch_kl, sampling/sampling_logp_difference/max": Column(
        "nats", "KL of the engine to the policy per token; largest gap of their log-probs", STEP
    ),
    "sft_variance, rl_variance, disagreement": Column("", "the paper's equations 8, 7, 9", END),
    "teacher_loss": Column("nats", "loss of the `teacher`, as reduced, before its weight", STEP),
    "teacher_tail": Column(
        "share", "of the teacher's probability: mass of the tokens beyond `teacher.top_k`", TEACHER
    ),
    "grad_norm, lr": Column("", "norm of the gradient before clipping; learning rate", STEP),
    "update_norm": Column("", "norm of the weights' change, with `log_update_norm`", STEP),
    "tokens, rollout_tokens": Column(
        "tokens", "of the rows, prompts included; of the rollouts, with a loss", STEP
    ),
    "completions/clipped_ratio": Column("share", "completions cut off at the limit", STATS),
    "completions/mean_length": Column("tokens", "sampled_tokens / sampled_completions", STATS),
    "frac_reward_zero_std, frac_solved, frac_unsolved": Column(
        "share", "prompts whose rewards are all equal; all at least 1; all below 1", STATS
    ),
    "resampled_prompts, sampled_completions, sampled_tokens": Column(
        "count", "prompts replaced because of equal rewards; what was sampled, all ranks", STATS
    ),
    "sampling_seconds, reward_seconds": Column("s", "their time, mean over ranks", STATS),
    "completions_per_second": Column("1/s", "sampled completions over their time", STATS),
    "seconds": Column("s", "wall-clock time of the step", "training.trainer"),
    "ended": Column("", "1 in the last row of a run that ends before `steps`", "training.trainer"),
    "sampling_share": Column("share", "sampling_seconds / seconds", "training.trainer"),
    "tokens_per_second": Column("1/s", "tokens / seconds", "training.trainer"),
    "rewards_dropped, rewards_EVENT": Column(
        "count", "rows without a reward (`on_error: drop`); a reward's events", "rewards.base"
    ),
    "mu_star, alpha, prior": Column(
        "", "the paper's equations 11 and 10; the schedule that mu is pulled towards", METHOD
    ),
    "demos_suspect": Column("0 or 1", "whether the alarm is on; a share with sources", METHOD),
    "trust, cosine, z": Column(
        "", "factor of the gate; gradients: their cosine, inner product / standard error", METHOD
    ),
    "alpha_step": Column(
        "",
        "logarithm of the last change of alpha before its bounds; 0: the KL was on target",
        METHOD,
    ),
    "average_kl, average_SIGNAL": Column("", "what the controller computes with: averages", METHOD),
    "read_SIGNAL": Column("", "what the signal source measured, before averaging", METHOD),
    "read_covariance, read_gamma": Column(
        "", "c of equation 4, with `paired`; gamma of the paper's appendix A, with `bias`", METHOD
    ),
    "solver_skipped": Column("steps", "updates that the solver skipped", METHOD),
    "reward_slope": Column("", "slope of the mean reward that amft follows", METHOD),
    "entropy_target": Column("nats", "entropy that amft steers to", METHOD),
}
"""Columns of metrics.jsonl -> what they are; capitals stand for names. A method of your own can add
columns (`Method.report`)."""
EVALUATION: dict[str, Column] = {
    "step": Column("steps", "optimizer steps before the evaluation", EVAL),
    "accuracy, accuracy/TASK, ci95": Column(
        "reward", "mean score of the first task; of each other one; 95% interval [low, high]", EVAL
    ),
    "pass@K, truncated": Column(
        "share", "prompts with a correct answer among K, estimated; answers cut off", EVAL
    ),
    "demo_nll": Column(
        "nats", "loss per token of the held-out demonstrations; null if no row has one", EVAL
    ),
    "prompts, response_length": Column("", "number of prompts; mean tokens of an answer", EVAL),
    "seconds": Column("s", "wall-clock time of all tasks", EVAL),
}
"""The same for eval.jsonl; the columns of a further task end with `/TASK`."""
