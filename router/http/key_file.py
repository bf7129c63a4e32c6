"""The file of API keys, read again when it changes: a key comes or goes without a restart. What is
under way with a key that goes is finished. A mistake in the file changes nothing but the log.
"""

from __future__ import annotations

import asyncio
import logging

from cluster.common.errors import ConfigurationError
from cluster.common.settings import RouterSettings
from cluster.common.settings_sources import read_api_keys
from router.http.keys import KeyRing

logger = logging.getLogger(__name__)

LOOK_S = 2.0  # between two looks at the file

Version = tuple[int, int, int] | None


class KeyFile:
    def __init__(self, settings: RouterSettings) -> None:
        """Raises ConfigurationError: the file cannot be read, or is no file of keys."""
        self._settings = settings
        self._file = settings.api_key_file and settings.api_key_file.expanduser()
        self._version = self._look()
        self.ring = KeyRing(self._read(), settings.max_requests_per_key)

    async def follow(self) -> None:
        while self._file is not None:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        version = await asyncio.to_thread(self._look)
        if version == self._version:
            return
        self._version = version
        try:
            self.ring.replace(await asyncio.to_thread(self._read))
            logger.info("the API keys have changed: there are %d", len(self.ring))
        except ConfigurationError as error:
            logger.error("the API keys stay as they were: %s", error.message)

    def _look(self) -> Version:
        """Differs when another file is there, also behind a link, as of Kubernetes' secrets."""
        try:
            stat = self._file and self._file.stat()
        except OSError:
            return None
        return (stat.st_mtime_ns, stat.st_ino, stat.st_size) if stat else None

    def _read(self) -> tuple[str, ...]:
        of_file = () if self._file is None else read_api_keys(self._file)
        return (*self._settings.api_key, *of_file)
