"""Makes `toys` importable here and in the fresh processes that the kit starts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
