"""Run by file name in a process of its own: rebuild a file with hf-xet and write it to stdout.

Only hf-xet can unpack chunks, and it keeps caches, logs and threads that have no place in the
process of the Hub. Reads one JSON object from stdin: endpoint, token, expires, file, size.
"""

from __future__ import annotations

import json
import sys

from hf_xet import XetFileInfo, XetSession  # type: ignore[import-untyped]

if __name__ == "__main__":
    job = json.load(sys.stdin)
    group = XetSession().new_download_stream_group(
        endpoint=job["endpoint"], token=job["token"], token_expiry_unix_secs=job["expires"]
    )
    for piece in group.download_stream(XetFileInfo(job["file"], job["size"])):
        sys.stdout.buffer.write(piece)
