"""Parse bodies: multipart forms as their bytes arrive, and JSON with base64 audio.

Each limit on a form is enforced at the byte that crosses it. JSON has the shape of OpenRouter's
transcription endpoint, which Open WebUI sends too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from cluster.common.errors import AudioTooShortError, InvalidRequestError, PayloadTooLargeError
from router.api.documents import (
    AUDIO_FIELD,
    DATA_PART,
    audio_of,
    pairs_of,
    read_json,
    repeated,
)
from router.api.kinds import base64_length
from router.api.request_fields import MAX_REFERENCE_BYTES as MAX_REFERENCE
from router.audio.protocol import too_large

FORM_TYPE = "multipart/form-data"
FILE_FIELD = "file"
MAX_FIELDS = 64
MAX_FIELD_BYTES = 64 * 1024
REFERENCES = "known_speaker_references"
MAX_REFERENCE_BYTES = base64_length(MAX_REFERENCE) + 256  # as a data URL
MAX_REFERENCES_BYTES = 4 * MAX_REFERENCE_BYTES  # of one form
LONG_FIELDS = {  # longest values in bytes: hours of speech, and recordings
    "text": 512 * 1024,
    "lines": 512 * 1024,
    REFERENCES: MAX_REFERENCE_BYTES,
}
MAX_FRAMING_BYTES = 1024 * 1024  # of a body, without the file and references

# The library warns of every malformed body, of which the client is told.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


class FileSink(Protocol):
    @property
    def size_bytes(self) -> int:
        pass

    def append(self, piece: bytes) -> None: ...


class FormReader:
    def __init__(
        self,
        boundary: bytes,
        sink: FileSink,
        max_upload_bytes: int,
        file_field: str = FILE_FIELD,
    ) -> None:
        self.filename = ""
        self._file_field = file_field
        self._sink = sink
        self._max_upload_bytes = max_upload_bytes
        self._read_bytes = self._reference_bytes = 0
        self._fields: list[tuple[str, str]] = []
        self._names: set[str] = set()
        self._has_file = False
        self._ended = False
        self._header_name, self._header_value = bytearray(), bytearray()
        self._disposition = ""
        self._name = ""
        self._in_file = False
        self._value = bytearray()
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begin,
                    "on_header_field": lambda data, a, b: self._header_name.extend(data[a:b]),
                    "on_header_value": lambda data, a, b: self._header_value.extend(data[a:b]),
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_finished,
                    "on_part_data": self._part_data,
                    "on_part_end": self._part_end,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise InvalidRequestError(f"the multipart boundary is malformed: {error}") from error

    def feed(self, chunk: bytes) -> None:
        self._read_bytes += len(chunk)
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise InvalidRequestError(f"the multipart body is malformed: {error}") from error
        others = self._read_bytes - self._sink.size_bytes - self._reference_bytes
        if others > MAX_FRAMING_BYTES or self._reference_bytes > MAX_REFERENCES_BYTES:
            raise PayloadTooLargeError(
                f"a form may have {MAX_REFERENCES_BYTES} bytes of '{REFERENCES}', and "
                f"{MAX_FRAMING_BYTES} bytes besides those and its file"
            )

    def finish(self) -> tuple[tuple[str, str], ...]:
        """The fields. Raises InvalidRequestError if the form or its file is incomplete."""
        if not self._ended:
            raise InvalidRequestError("the multipart body ends before its closing boundary")
        if not self._has_file:
            raise _no_file(self._file_field)
        if self._sink.size_bytes == 0:
            raise AudioTooShortError("the uploaded file is empty", param=self._file_field)
        return tuple(self._fields)

    def _part_begin(self) -> None:
        self._disposition = ""
        self._value = bytearray()

    def _header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value.decode("latin-1")
        self._header_name, self._header_value = bytearray(), bytearray()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise InvalidRequestError("a part of the form has no name")
        self._name = _text(options[b"name"], "a field's name")
        filename = options.get(b"filename")
        self._in_file = self._name == self._file_field
        if self._in_file:
            if not filename:  # a text instead of a file, or a browser's empty file input
                raise _no_file(self._file_field)
            if self._has_file:
                raise InvalidRequestError("send one file, not several", param=self._file_field)
            self._has_file = True
            self.filename = filename.decode("utf-8", "replace")
        elif filename is not None:
            shown = self._name[:64]
            raise InvalidRequestError(f"field {shown!r} must be text, not a file", param=shown)

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._sink.append(data[start:end])
            if self._sink.size_bytes > self._max_upload_bytes:
                raise too_large(self._max_upload_bytes, self._read_bytes)
            return
        self._value += data[start:end]
        if _check_length(self._name, len(self._value)) == MAX_REFERENCE_BYTES:
            self._reference_bytes += end - start

    def _part_end(self) -> None:
        if self._in_file:
            return
        self._names.add(self._name.partition("[")[0])  # items of a list count as one field
        if len(self._names) > MAX_FIELDS:
            raise InvalidRequestError(f"the form has more than {MAX_FIELDS} fields")
        self._fields.append((self._name, _text(bytes(self._value), f"field {self._name[:64]!r}")))

    def _end(self) -> None:
        self._ended = True


def _check_length(name: str, n_bytes: int) -> int:
    """Returns the limit in bytes of a field's value. Raises InvalidRequestError."""
    most = LONG_FIELDS.get(name.partition("[")[0], MAX_FIELD_BYTES)
    if n_bytes > most:
        raise InvalidRequestError(
            f"field {name[:64]!r} is longer than {most} bytes", param=name[:64]
        )
    return most


def media_type(headers: Mapping[str, str]) -> bytes:
    """In lower case; empty without a header."""
    found: bytes = parse_options_header(headers.get("content-type", ""))[0]
    return found


def form_boundary(headers: Mapping[str, str], expected: str = FORM_TYPE) -> bytes:
    """The boundary in Content-Type. Raises InvalidRequestError, which names what is `expected`."""
    sort, options = parse_options_header(headers.get("content-type", ""))
    if sort != FORM_TYPE.encode():
        came = sort.decode("latin-1")[:64] or "no Content-Type"
        raise InvalidRequestError(f"the body must be {expected}, not {came!r}")
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise InvalidRequestError("the Content-Type header has no multipart boundary")
    return boundary


def _no_file(field: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"no audio was sent: send it as the upload named '{field}', with a file name"
    )


def _text(content: bytes, what: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{what} is not UTF-8") from error


# ---- JSON

JSON_TYPE = b"application/json"
GROWTH = 1.5  # largest ratio of a body to its audio in bytes: base64 with some escaped characters

DATA = f"{AUDIO_FIELD}.{DATA_PART}"  # its name in error messages


def read_document(content: bytes) -> tuple[tuple[tuple[str, str], ...], str]:
    """Returns the fields and the base64 of the audio. Raises SplitscribeError."""
    try:
        document = read_json(content, MAX_FRAMING_BYTES, (AUDIO_FIELD, DATA_PART))
    except PayloadTooLargeError:
        raise PayloadTooLargeError(
            f"a JSON body may have {MAX_FRAMING_BYTES} bytes besides '{DATA}'; send longer "
            f"'{REFERENCES}' in a form"
        ) from None
    except InvalidRequestError as error:
        if error.param == DATA_PART:
            raise repeated(DATA) from None
        raise
    except ValueError as error:
        raise InvalidRequestError(f"the body is not a JSON document: {error}") from None
    if not isinstance(document, dict):
        raise InvalidRequestError("the body must be a JSON object")
    if not (data := audio_of(document)):
        raise AudioTooShortError("the audio is empty", param=DATA)
    fields = pairs_of(document)
    if len(fields) > MAX_FIELDS:
        raise InvalidRequestError(f"the document has more than {MAX_FIELDS} fields")
    for name, text in fields:
        _check_length(name, len(text.encode()))
    return fields, data
