"""The two paths: of a version to its workers, and of a token to its update."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from parts import bars, board, figures, lines, newest, quantile, rate, traces


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
