"""The native ops: each wrapper documents its op, views rows as two-dimensional and raises the package's own errors.

Every one raises :class:`~pyg_dist.errors.DataError` where a shape, a dtype, a value or the pattern does not fit, or
``out`` shares memory with another argument, and :class:`~pyg_dist.errors.UnsupportedError` where a tensor is not dense
or there are no kernels for its device. None is collective, and only :func:`keyed_dropout` is differentiable: the
derivatives of the others stand in the modules that use them. Every op has a readable twin in
``tests/reference_ops.py``. After the wrappers of a file stands what torch.compile and FakeTensor see instead of the
kernels.

Legend: N rows, M source rows, E edges, F columns, R selected rows. The *sum dtype* of float64 is float64; of float32
and those of 16 bits, float32.
"""

from pyg_dist.backend.ops.attention import AttentionInputs as AttentionInputs
from pyg_dist.backend.ops.attention import AttentionSpec as AttentionSpec
from pyg_dist.backend.ops.attention import Far as Far
from pyg_dist.backend.ops.attention import Sums as Sums
from pyg_dist.backend.ops.attention import attention_csr as attention_csr
from pyg_dist.backend.ops.attention import attention_csr_by_source as attention_csr_by_source
from pyg_dist.backend.ops.attention import attention_csr_by_target as attention_csr_by_target
from pyg_dist.backend.ops.attention import empty_sums as empty_sums
from pyg_dist.backend.ops.keyed import keyed_dropout as keyed_dropout
from pyg_dist.backend.ops.keyed import keyed_normal as keyed_normal
from pyg_dist.backend.ops.keyed import keyed_permutation as keyed_permutation
from pyg_dist.backend.ops.keyed import keyed_uniform as keyed_uniform
from pyg_dist.backend.ops.keyed import mixed_seed as mixed_seed
from pyg_dist.backend.ops.keyed import sample_rows as sample_rows
from pyg_dist.backend.ops.library import FLOATS as FLOATS
from pyg_dist.backend.ops.library import sum_dtype as sum_dtype
from pyg_dist.backend.ops.patterns import add_places as add_places
from pyg_dist.backend.ops.patterns import bipartite_matching as bipartite_matching
from pyg_dist.backend.ops.patterns import decode_ids as decode_ids
from pyg_dist.backend.ops.patterns import distinct as distinct
from pyg_dist.backend.ops.patterns import encode_ids as encode_ids
from pyg_dist.backend.ops.patterns import equals_transpose_csr as equals_transpose_csr
from pyg_dist.backend.ops.patterns import find_numbers as find_numbers
from pyg_dist.backend.ops.patterns import find_sorted as find_sorted
from pyg_dist.backend.ops.patterns import restrict_csr as restrict_csr
from pyg_dist.backend.ops.patterns import transpose_csr as transpose_csr
from pyg_dist.backend.ops.quantize import dequantize_csr_add as dequantize_csr_add
from pyg_dist.backend.ops.quantize import quantize_csr as quantize_csr
from pyg_dist.backend.ops.rows import Norm as Norm
from pyg_dist.backend.ops.rows import NormReLUDropoutSpec as NormReLUDropoutSpec
from pyg_dist.backend.ops.rows import empty_rows as empty_rows
from pyg_dist.backend.ops.rows import gather_rows as gather_rows
from pyg_dist.backend.ops.rows import norm_relu_dropout as norm_relu_dropout
from pyg_dist.backend.ops.rows import norm_relu_dropout_grad as norm_relu_dropout_grad
from pyg_dist.backend.ops.rows import relu as relu
from pyg_dist.backend.ops.rows import relu_grad as relu_grad
from pyg_dist.backend.ops.rows import row_moments as row_moments
from pyg_dist.backend.ops.rows import row_norm_grad_ as row_norm_grad_
from pyg_dist.backend.ops.rows import scatter_add_rows as scatter_add_rows
from pyg_dist.backend.ops.sparse import SpmmForm as SpmmForm
from pyg_dist.backend.ops.sparse import SpmmOptions as SpmmOptions
from pyg_dist.backend.ops.sparse import SpmmWay as SpmmWay
from pyg_dist.backend.ops.sparse import csr_from_edges as csr_from_edges
from pyg_dist.backend.ops.sparse import extreme_csr as extreme_csr
from pyg_dist.backend.ops.sparse import extreme_csr_grad as extreme_csr_grad
from pyg_dist.backend.ops.sparse import extreme_csr_shares as extreme_csr_shares
from pyg_dist.backend.ops.sparse import guessed_form as guessed_form
from pyg_dist.backend.ops.sparse import sddmm_csr as sddmm_csr
from pyg_dist.backend.ops.sparse import spmm_csr as spmm_csr
