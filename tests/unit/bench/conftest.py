# SPDX-License-Identifier: Apache-2.0
"""The tools of `tools/bench` import one another as a script's neighbours do; so do their tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools" / "bench"))
