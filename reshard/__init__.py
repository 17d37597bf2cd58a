"""Where the state of a job is and how to move it: the pure bottom layer, numpy only.

Executing a plan (`reshard.execute`), box arithmetic (`reshard.boxes`), the explanations of coverage
(`reshard.coverage`), buddies (`reshard.redundancy`) and the error classes (`reshard.errors`) are
imported by path.
"""

from reshard.batches import plan_batch, sample_ids
from reshard.boxes import Box
from reshard.coverage import newest_covered_step
from reshard.errors import ElasticError
from reshard.holdings import Holding, layout_holdings
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout
from reshard.mesh import MeshLayout
from reshard.plan import Plan
from reshard.planner import make_plan
from reshard.redundancy import captures
from reshard.transfer import Transfer

__all__ = [
    "ArrayLayout",
    "Box",
    "ElasticError",
    "Holding",
    "HostId",
    "Layout",
    "MeshLayout",
    "Plan",
    "Transfer",
    "captures",
    "layout_holdings",
    "make_plan",
    "newest_covered_step",
    "plan_batch",
    "sample_ids",
]
