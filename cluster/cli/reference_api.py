"""Write `configs/API.md` from the declarations of the request fields.

python -m cluster.cli.reference_api > configs/API.md
"""

from __future__ import annotations

from typing import Any

from router.api.kinds import ALL, BOTH, RequestField
from router.api.openapi import values_of
from router.api.params import Operation
from router.api.request_fields import SECTIONS

ENDPOINT_NAMES: dict[Operation, str] = {
    "transcribe": "transcriptions",
    "translate": "translations",
    "align": "alignments",
}
HEADER = """\
<!-- Written by `python -m cluster.cli.reference_api > configs/API.md`. -->
# The fields of a request

`POST /v1/audio/transcriptions`, `/v1/audio/translations` and `/v1/audio/alignments` take a
multipart form with the fields below, in any order. The table says which endpoint has each, whose
field it is, and its flag of `splitscribe transcribe`. Fields that are not OpenAI's go into
`extra_body` of its SDKs. An alignment's `response_format` is `json`, `srt` or `vtt`.

A list may be sent as `name[]` several times, as `name[0]`, `name[1]` and so on, or as JSON in
`name`; an object as `name[key]` or as JSON in `name`. Flags may be written with dashes or with
underscores. A field or value that is not described here, or that conflicts with another, is
refused with a 400 that names it.

In place of a form all three take JSON (`Content-Type: application/json`): the same fields with
JSON's own numbers, booleans, lists and objects, and in place of `file` the object `input_audio` of
`data`, the file's bytes in base64, and `format`, such as `wav`. Here too the format is found from
the content. `null` means that the field was not sent. The limit on uploads
(`router.max_upload_bytes`) holds for the decoded audio, which is written to disk as it comes.
Everything except `input_audio` may have 1 MiB together, recordings of known speakers included.

The header `x-splitscribe-timeout` limits a request to that number of seconds from the end of its
upload on; then it ends with a 504 (`timeout_exceeded`). Where the file says how long it is, and the
time would not suffice at the recent speed of the workers, it is refused at once with a 400
(`timeout_too_short`). Without the header it has no limit while windows are finished.

The lines of a batch take the same fields in their `body`; [BATCHES.md](BATCHES.md) says how they
name their audio.

With `router.asr_webservice: true` the server also answers `/asr` and `/detect-language` as
whisper-asr-webservice does; [WORKS-WITH.md](WORKS-WITH.md#asr-and-detect-language) says how.
"""
HEAD = """\
| field | values | default | what it does | from | endpoints | flag |
| --- | --- | --- | --- | --- | --- | --- |"""


def reference_api() -> str:
    tables = (
        "\n".join((f"\n## {section}\n", HEAD, *map(_row, fields))) + "\n"
        for section, fields in SECTIONS.items()
    )
    return HEADER + "".join(tables)


def _row(field: RequestField) -> str:
    schema = field.kind.schema()
    cells = (
        f"`{field.spelling}`",
        values_of(schema, {}),
        _default(schema.get("default", field.default)),
        field.description,
        field.origin,
        _endpoints(field),
        f"`{field.flag}`" if field.flag else "",
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _endpoints(field: RequestField) -> str:
    if field.tasks == BOTH:
        return "all but alignments"
    if field.tasks == ALL:
        return "all"
    return ", ".join(ENDPOINT_NAMES[task] for task in field.tasks)


def _default(value: Any) -> str:
    if value in (None, ()):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    print(reference_api(), end="")
