"""`splitscribe batch` as the command line lists it; its flags are declared when it is chosen."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class BatchCommand(TyperCommand):
    """Stands for the command that `cluster.cli.batch.command` makes."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        from cluster.cli.batch.command import batch_command

        return batch_command(self.help).make_context(info_name, args, parent, **extra)


def batch() -> None:
    """Transcribe an archive: files, folders, buckets and manifests.

    It uses the application of the Ray cluster on this machine or at --address, after all more
    urgent requests there. Without an application it starts one for this run. A second run
    transcribes only what is missing. The exit status is 0 if all files have their transcripts,
    and 3 if some failed.

    Example: splitscribe batch s3://talks/2026 -o s3://texts/2026 -f srt
    """
