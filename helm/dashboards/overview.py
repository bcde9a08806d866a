"""What a run is doing, at a glance."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from parts import board, figures, lines, newest, rate, rows, top


def run_overview() -> dashboard.Dashboard:
    """How the jobs do."""
    made = board("syncline-run", "syncline: run overview", "Progress, reward, loss, speed and what waits.")
    info = newest("job_id, name, state, mode, phase, recipe", "syncline_job_info")
    tokens = f"sum by (job_id) ({rate('job_id, worker', 'syncline_sampled_tokens_total')})"
    progress = f"{newest('job_id', 'syncline_update')} / {newest('job_id', 'syncline_updates_wanted')}"
    return (
        made.with_panel(figures("Jobs", "short", (top("state", "syncline_jobs"), "{{state}}")))
        .with_panel(
            figures("Progress", "percentunit", (progress, "{{job_id}}"), says="Updates made of those wanted.")
        )
        .with_panel(figures("Sampled tokens per second", "short", (tokens, "{{job_id}}")))
        .with_panel(figures("Reward", "short", (newest("job_id", "syncline_reward"), "{{job_id}}")))
        .with_panel(rows("Jobs shown", (info, ""), says="Those that run or have ended within 15 minutes."))
        .with_panel(
            lines("Reward of the newest update", "short", (newest("job_id", "syncline_reward"), "{{job_id}}"))
        )
        .with_panel(lines("Loss", "short", (newest("job_id", "syncline_loss"), "{{job_id}}")))
        .with_panel(
            lines(
                "Entropy and gradient norm",
                "short",
                (newest("job_id", "syncline_entropy"), "entropy {{job_id}}"),
                (newest("job_id", "syncline_grad_norm"), "gradient norm {{job_id}}"),
            )
        )
        .with_panel(
            lines(
                "Importance ratio and clipping",
                "short",
                (newest("job_id", "syncline_ratio_mean"), "mean ratio {{job_id}}"),
                (newest("job_id", "syncline_clip_fraction"), "clipped {{job_id}}"),
            )
        )
        .with_panel(
            lines(
                "Tokens per second",
                "short",
                (tokens, "sampled {{job_id}}"),
                (rate("job_id", "syncline_trained_tokens_total"), "trained {{job_id}}"),
            )
        )
        .with_panel(
            lines(
                "Tokens per response",
                "short",
                (newest("job_id", "syncline_response_tokens_mean"), "{{job_id}}"),
            )
        )
        .with_panel(
            lines(
                "Updates per minute",
                "short",
                (f"60 * {rate('job_id', 'syncline_updates_total')}", "{{job_id}}"),
            )
        )
        .with_panel(
            lines(
                "Waits",
                "s",
                (
                    f"{newest('job_id, wait', 'syncline_wait_seconds')} or on () vector(0)",
                    "{{wait}} {{job_id}}",
                ),
                says="Age of what a job waits for now. Every wait has a name and a deadline; 0: nothing waits.",
            )
        )
        .with_panel(
            rows(
                "Processes", (top("job_id, service, process", "syncline_process_ready"), ""), says="1: ready."
            )
        )
    )
