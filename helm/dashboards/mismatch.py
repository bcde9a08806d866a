"""Precision against staleness."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from parts import bars, board, figures, heat, lines, newest, rate, rows


def precision() -> dashboard.Dashboard:
    """total = mismatch (two executions of one version) + staleness (two versions of one execution)."""
    says = "total = mismatch (same version, two engines) + staleness (same engine, two versions), per token."
    made = board("syncline-precision", "syncline: precision against staleness", says)
    lag = "syncline_mismatch_by_lag"
    return (
        made.with_panel(
            lines(
                "Terms, mean",
                "none",
                (newest("job_id, term", "syncline_mismatch_mean"), "{{term}} {{job_id}}"),
            )
        )
        .with_panel(
            lines(
                "Terms, 99th percentile",
                "none",
                (newest("job_id, term", "syncline_mismatch", ',quantile="0.99"'), "{{term}} {{job_id}}"),
            )
        )
        .with_panel(
            lines(
                "Mismatch against its baseline",
                "none",
                (newest("job_id", "syncline_mismatch_mean", ',term="mismatch"'), "mismatch {{job_id}}"),
                (newest("job_id", "syncline_mismatch_baseline"), "baseline {{job_id}}"),
                says="The baseline is what the contract's own formats amount to at the same version.",
            )
        )
        .with_panel(
            lines(
                "Share of tokens with mismatch exactly 0",
                "percentunit",
                (newest("job_id", "syncline_mismatch_exact"), "{{job_id}}"),
            )
        )
        .with_panel(
            bars(
                "Staleness by lag",
                "none",
                (
                    newest("job_id, lag, quantile", lag, ',term="staleness"'),
                    "lag {{lag}} q {{quantile}} {{job_id}}",
                ),
            )
        )
        .with_panel(
            bars(
                "Mismatch by lag",
                "none",
                (
                    newest("job_id, lag, quantile", lag, ',term="mismatch"'),
                    "lag {{lag}} q {{quantile}} {{job_id}}",
                ),
                says="It should not depend on lag: where it does, staleness leaks into what is measured as mismatch.",
            )
        )
        .with_panel(
            heat("Lag of trained trajectories", f"sum by (le) ({rate('job_id, le', 'syncline_lag_bucket')})")
        )
        .with_panel(
            lines(
                "Lag",
                "short",
                (
                    f"{rate('job_id', 'syncline_lag_sum')} / {rate('job_id', 'syncline_lag_count')}",
                    "mean {{job_id}}",
                ),
                (newest("job_id", "syncline_lag_bound"), "bound {{job_id}}"),
            )
        )
        .with_panel(
            lines(
                "Gap of log-probs as trained",
                "none",
                (newest("job_id, over", "syncline_logprob_gap"), "{{over}} {{job_id}}"),
            )
        )
        .with_panel(
            lines(
                "Effective sample size of the importance weights",
                "percentunit",
                (newest("job_id", "syncline_effective_sample_size"), "{{job_id}}"),
            )
        )
        .with_panel(
            lines(
                "Tokens cut per second",
                "short",
                (rate("job_id, why", "syncline_tokens_cut_total"), "{{why}} {{job_id}}"),
            )
        )
        .with_panel(
            lines(
                "Tokens routed as recorded",
                "percentunit",
                (newest("job_id, over", "syncline_route_agreement"), "{{over}} over layers {{job_id}}"),
                says="Models with experts only.",
            )
        )
        .with_panel(
            figures(
                "Alarms",
                "short",
                (newest("job_id", "syncline_mismatch_alarms_total"), "{{job_id}}"),
                width=12,
            )
        )
        .with_panel(
            rows(
                "Not measured in the newest update",
                (newest("job_id, term", "syncline_mismatch_unmeasured"), ""),
                width=12,
            )
        )
    )
