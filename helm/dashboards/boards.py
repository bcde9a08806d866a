"""The six boards. What each number means: docs/metrics.md."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from parts import JOB, bars, board, figures, heat, lines, newest, quantile, rate, rows, top, traces


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


def version_path() -> dashboard.Dashboard:
    """From an optimizer step to active on each worker."""
    made = board(
        "syncline-versions", "syncline: version path", "From an optimizer step to active on each worker."
    )
    stages = "syncline_version_seconds"
    pause = "syncline_sync_pause_seconds"
    return (
        made.with_panel(
            lines("Newest version", "short", (newest("job_id, at", "syncline_version"), "{{at}} {{job_id}}"))
        )
        .with_panel(
            lines(
                "Version of each worker",
                "short",
                (newest("job_id, worker", "syncline_worker_version"), "{{worker}} {{job_id}}"),
            )
        )
        .with_panel(
            lines(
                "Versions behind the newest minted",
                "short",
                (newest("job_id, worker", "syncline_worker_versions_behind"), "{{worker}} {{job_id}}"),
            )
        )
        .with_panel(
            lines(
                "Age of the version in use",
                "s",
                (newest("job_id, worker", "syncline_version_age_seconds"), "{{worker}} {{job_id}}"),
            )
        )
        .with_panel(
            bars(
                "From minting to each stage",
                "s",
                (quantile(0.5, "stage", stages), "{{stage}} median"),
                (quantile(0.95, "stage", stages), "{{stage}} 95 %"),
                says="Over the time shown; staged, verified and active once per worker.",
            )
        )
        .with_panel(
            bars(
                "The version in use: from minting to each stage",
                "s",
                (
                    newest("job_id, worker, stage", "syncline_version_reached_seconds"),
                    "{{worker}} {{stage}} {{job_id}}",
                ),
            )
        )
        .with_panel(
            bars(
                "Pause of a commit",
                "s",
                (quantile(0.5, "job_id", pause), "median {{job_id}}"),
                (quantile(0.99, "job_id", pause), "99 % {{job_id}}"),
            )
        )
        .with_panel(
            lines(
                "Bytes of versions per second",
                "Bps",
                (rate("job_id, kind", "syncline_sync_bytes_total"), "{{kind}} {{job_id}}"),
                says="whole: of versions; new: not in the store before; full, deltas: travelled; held: were there.",
            )
        )
        .with_panel(
            lines(
                "Share of elements that a version changed",
                "percentunit",
                (newest("job_id", "syncline_version_changed_share"), "{{job_id}}"),
            )
        )
        .with_panel(
            figures(
                "Versions that no worker took",
                "short",
                (newest("job_id", "syncline_versions_failed_total"), "{{job_id}}"),
            )
        )
        .with_panel(
            figures(
                "Epoch",
                "short",
                (newest("job_id", "syncline_epoch"), "{{job_id}}"),
                says="Resumes of the trainer.",
            )
        )
        .with_panel(
            traces(
                "Versions, from minting on",
                '{ name = "version.minted" && span.job =~ "$job_id" } | select(span.version, span.optimizer_step)',
                says="A trace holds the version's whole path; its links are the trajectories that it was trained on.",
            )
        )
        .with_panel(
            traces(
                "Activations on workers",
                '{ name = "version.active" && span.job =~ "$job_id" } '
                "| select(span.version, span.worker, span.pause_ms, span.policy, span.in_flight)",
                spans=True,
            )
        )
    )


def token_path() -> dashboard.Dashboard:
    """What happened to one trajectory, and which ones to look at."""
    made = board(
        "syncline-tokens", "syncline: token path", "A trajectory's hops; and trajectories worth a look."
    )
    name = dashboard.TextBoxVariable("trajectory").label("trajectory id").default_value("")
    of_job = 'span.job =~ "$job_id"'
    return (
        made.with_variable(name)
        .with_panel(
            traces(
                "Hops of trajectory $trajectory",
                '{ span.trajectory = "$trajectory" } | select(span.version, span.worker, span.update, span.lag, '
                "span.reward, span.advantage)",
                says="prompted, sampled (once per version span), published, rewarded, admitted, scored, trained.",
                spans=True,
            )
        )
        .with_panel(
            traces(
                "Newest trajectories sampled",
                f'{{ name = "token.sampled" && {of_job} }} '
                "| select(span.trajectory, span.version, span.context, span.worker)",
            )
        )
        .with_panel(
            traces(
                "Sampled under more than one version",
                f'{{ name = "token.sampled" && span.start > 0 && {of_job} }} | select(span.trajectory, span.version)',
                width=12,
            )
        )
        .with_panel(
            traces(
                "Admitted with lag",
                f'{{ name = "token.admitted" && span.lag > 0 && {of_job} }} '
                "| select(span.trajectory, span.update, span.lag)",
                width=12,
            )
        )
        .with_panel(
            traces(
                "Rewards that took over a second, or gave no score",
                f'{{ name = "token.rewarded" && {of_job} && (duration > 1s || span.state != "scored") }} '
                "| select(span.trajectory, span.state, span.reward)",
                width=12,
            )
        )
        .with_panel(
            traces(
                "Failed hops",
                f"{{ status = error && {of_job} }} | select(span.trajectory, span.error)",
                width=12,
            )
        )
        .with_panel(
            lines("Spans ended per second", "short", (rate("service", "syncline_spans_total"), "{{service}}"))
        )
        .with_panel(
            lines(
                "What the traces lack",
                "short",
                (
                    f"sum by (service, why) ({newest('service, process, why, job_id', 'syncline_spans_missing')})",
                    "{{service}} {{why}}",
                ),
                says="Spans of the last second count as missing by exporter; what stays above is lost.",
            )
        )
    )


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


BOARDS = {
    "run-overview": run_overview,
    "version-path": version_path,
    "token-path": token_path,
    "precision": precision,
    "phases": phases,
    "data-plane": data_plane,
}
__all__ = ["BOARDS", "JOB"]
