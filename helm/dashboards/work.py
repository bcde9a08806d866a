"""Who works when, and what moves between them."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from parts import bars, board, figures, lines, newest, quantile, rate, rows


def phases() -> dashboard.Dashboard:
    """Where the time goes."""
    made = board("syncline-phases", "syncline: phases and utilization", "Where the time of engines goes.")
    busy = rate("job_id, side, worker", "syncline_busy_seconds_total")
    awake = rate("job_id, side", "syncline_awake_seconds_total")
    idle = f"1 - sum by (job_id, side) ({busy}) / ({awake} > 0)"
    return (
        made.with_panel(
            lines(
                "Phase",
                "percentunit",
                (
                    rate("job_id, mode, phase", "syncline_phase_seconds_total"),
                    "{{mode}} {{phase}} {{job_id}}",
                ),
                says="Share of the time in each phase.",
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Idle share of awake engines",
                "percentunit",
                (idle, "{{side}} {{job_id}}"),
                says="Of the time in which a side was ordered awake: what its engines neither sampled nor trained.",
            )
        )
        .with_panel(
            bars(
                "Seconds per phase",
                "s",
                (
                    f"{newest('job_id, mode, phase', 'syncline_phase_seconds_total')} / "
                    f"{newest('job_id, mode, phase', 'syncline_phases_total')}",
                    "{{mode}} {{phase}} {{job_id}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Engines at work",
                "short",
                (rate("job_id, side, worker", "syncline_busy_seconds_total"), "{{worker}} {{job_id}}"),
                says="1: the engine never rests.",
            )
        )
        .with_panel(
            bars(
                "Step and wait for the batch",
                "s",
                (quantile(0.5, "job_id", "syncline_update_seconds"), "step, median {{job_id}}"),
                (quantile(0.95, "job_id", "syncline_update_seconds"), "step, 95 % {{job_id}}"),
                (quantile(0.5, "job_id", "syncline_batch_wait_seconds"), "wait, median {{job_id}}"),
                (quantile(0.95, "job_id", "syncline_batch_wait_seconds"), "wait, 95 % {{job_id}}"),
            )
        )
        .with_panel(
            lines(
                "Tokens per second of each worker",
                "short",
                (newest("job_id, worker", "syncline_tokens_per_second"), "{{worker}} {{job_id}}"),
            )
        )
        .with_panel(
            lines(
                "Requests of each worker",
                "short",
                (
                    newest("job_id, worker, state", "syncline_worker_requests"),
                    "{{worker}} {{state}} {{job_id}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Resident memory of each worker",
                "bytes",
                (newest("job_id, worker", "syncline_worker_resident_bytes"), "{{worker}} {{job_id}}"),
            )
        )
        .with_panel(
            rows(
                "State of each worker",
                (newest("job_id, worker, state", "syncline_worker_state"), ""),
                width=12,
            )
        )
        .with_panel(
            lines(
                "Rollout workers",
                "short",
                (newest("job_id, which", "syncline_pool_workers"), "{{which}} {{job_id}}"),
                says="How many are wanted, come and leave, between the bounds that the spec states.",
            )
        )
    )


def data_plane() -> dashboard.Dashboard:
    """Trajectories on their way, and what carries them."""
    made = board(
        "syncline-data", "syncline: data plane", "Queues, credits, drops, errands, Redis and the gateway."
    )
    buckets = "max by (le, route) (rate(syncline_gateway_seconds_bucket[$__rate_interval]))"
    return (
        made.with_panel(
            lines(
                "Queues", "short", (newest("job_id, queue", "syncline_queue_depth"), "{{queue}} {{job_id}}")
            )
        )
        .with_panel(
            lines(
                "Credits",
                "short",
                (newest("job_id", "syncline_credits"), "{{job_id}}"),
                says="Groups that may still be submitted. They bound volume; the lag bound is kept at begin and claim.",
            )
        )
        .with_panel(
            lines(
                "Trajectories by state",
                "short",
                (newest("job_id, state", "syncline_trajectories"), "{{state}} {{job_id}}"),
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Submitted and trained per second",
                "short",
                (rate("job_id", "syncline_submitted_trajectories_total"), "submitted {{job_id}}"),
                (rate("job_id", "syncline_trained_trajectories_total"), "trained {{job_id}}"),
            )
        )
        .with_panel(
            bars(
                "Groups dropped, and why",
                "short",
                (newest("job_id, how, why", "syncline_groups_dropped_total"), "{{how}} {{why}} {{job_id}}"),
            )
        )
        .with_panel(
            bars(
                "Calls that changed nothing or began anew",
                "short",
                (newest("job_id, what", "syncline_ledger_calls_total"), "{{what}} {{job_id}}"),
            )
        )
        .with_panel(
            figures("Dead letters", "short", (newest("job_id", "syncline_dead_letters"), "{{job_id}}"))
        )
        .with_panel(
            figures(
                "Conservation law broken",
                "short",
                (newest("job_id", "syncline_conservation_violations_total"), "{{job_id}}"),
                says="submitted = running + buffered + trained + filtered + failed + expired, looked at each second.",
            )
        )
        .with_panel(
            figures(
                "Without a score",
                "short",
                (newest("job_id", "syncline_unscored_trajectories_total"), "{{job_id}}"),
            )
        )
        .with_panel(
            figures(
                "Groups over the lag bound",
                "short",
                (newest("job_id", "syncline_groups_over_lag_total"), "{{job_id}}"),
            )
        )
        .with_panel(lines("Errands that wait", "short", ("max (syncline_errands_queued)", "errands")))
        .with_panel(lines("Redis memory", "bytes", ("max (syncline_redis_memory_bytes)", "used")))
        .with_panel(figures("Redis answers", "bool", ("min (syncline_redis_up)", "Redis")))
        .with_panel(
            lines(
                "Gateway: requests per second",
                "reqps",
                (
                    "sum by (route, status) (rate(syncline_gateway_requests_total[$__rate_interval]))",
                    "{{route}} {{status}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Gateway: 95 % of answers begin within",
                "s",
                (f"histogram_quantile(0.95, {buckets})", "{{route}}"),
            )
        )
    )
