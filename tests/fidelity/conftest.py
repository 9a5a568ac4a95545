"""Makes `fidelity_lab` importable, here and in the processes that these tests start."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
