"""One self-contained HTML page: the diagnosis in sentences, then the measured numbers to explore.

No network, no server: the charting library (plotly.js, cartesian bundle 4.1.1, MIT) and the
numbers are inside the file.
"""

from .page import write

__all__ = ["write"]
