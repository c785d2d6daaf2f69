// The whole native API, one page. Every op is documented, with shapes and errors, by its wrapper in
// pyg_dist/backend/ops/; fakes and derivatives live in Python. ops/<op>.cpp checks and allocates for every device, and
// ops/device.h lists what a device does.
//
// Ops that write into an argument return nothing, so that torch.compile can functionalize them.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(pyg_dist, m) {
  // Entries grouped by row in their order: rowptr, col, and edge (or where each stood, where none is given; empty where
  // that is the order of the entries already)
  m.def("csr_from_edges(Tensor row, Tensor col, Tensor? edge, int num_rows, int num_cols) -> (Tensor, Tensor, Tensor)");

  // y[i] = row_scale[i] * sum_e weight[e] * col_scale[col[e]] * x[col[e]], e in [rowptr[i], rowptr[i + 1]); with
  // `divide` both scales divide instead. form and prefetch_edges (problems/spmm_csr.h) change no bits
  m.def(
      "spmm_csr(Tensor rowptr, Tensor col, Tensor x, Tensor? weight, Tensor? row_scale, Tensor? col_scale, "
      "bool divide, int form, int prefetch_edges) -> Tensor");
  // 0 if the product has one form; else which one the processor's caches speak for, 1 or 2: problems/spmm_csr.h
  m.def("spmm_csr_guess(Tensor rowptr, Tensor col, Tensor x) -> int");
  // out = the first
  m.def(
      "spmm_csr_into(Tensor(a!) out, Tensor rowptr, Tensor col, Tensor x, Tensor? weight, Tensor? row_scale, "
      "Tensor? col_scale, bool divide, int form, int prefetch_edges) -> ()");
  // out += the first
  m.def(
      "spmm_csr_add(Tensor(a!) out, Tensor rowptr, Tensor col, Tensor x, Tensor? weight, Tensor? row_scale, "
      "Tensor? col_scale, bool divide, int form, int prefetch_edges) -> ()");
  // d[e] = <a[i], b[col[e]]>, e in [rowptr[i], rowptr[i + 1])
  m.def("sddmm_csr(Tensor rowptr, Tensor col, Tensor a, Tensor b) -> Tensor");

  // y[i] = max (or min) of x[col[e]] over row i; s[i] = grad[i] / its ties; the last takes the transposed pattern and
  // sums s over the rows whose extreme x[j] is: problems/extreme_csr.h, formats/extreme.h
  m.def("extreme_csr(Tensor rowptr, Tensor col, Tensor x, bool largest) -> Tensor");
  m.def("extreme_csr_shares(Tensor rowptr, Tensor col, Tensor x, Tensor y, Tensor grad) -> Tensor");
  m.def("extreme_csr_grad(Tensor rowptr, Tensor col, Tensor x, Tensor y, Tensor shares) -> Tensor");

  // y[i] = sum over e of dropout(softmax of logits over row i)[e] * value[col[e]], each head for itself; and the same
  // sums of edge_attr[edge[e]], and the logarithm of the sum of the logits' exponentials; form: 0 additive, 1 dynamic,
  // 2 dot. The gradients compute all else again: by query, edge_weight, edge_attr, and by att and edge_weight of form 1
  // in one; the last takes the transposed pattern and has those by value and key: problems/attention.h
  m.def(
      "attention_csr(Tensor(a!) y, Tensor(b!) z, Tensor(c!) lse, Tensor rowptr, Tensor col, Tensor edge, Tensor value, "
      "Tensor? key, Tensor? query, Tensor? edge_attr, Tensor? edge_weight, Tensor? att, Tensor? edge_key, int "
      "form, int heads, float slope, float scale, float p, int seed, Tensor? far_value, Tensor? far_key, bool is_part) "
      "-> ()");
  m.def(
      "attention_csr_by_target(Tensor rowptr, Tensor col, Tensor edge, Tensor value, Tensor? key, Tensor? query, "
      "Tensor? edge_attr, Tensor? "
      "edge_weight, Tensor? att, Tensor? edge_key, int form, int heads, float slope, float scale, float p, int seed, "
      "Tensor? far_value, Tensor? far_key, Tensor lse, Tensor delta, Tensor grad, Tensor? grad_z, bool by_edge_attr) "
      "-> (Tensor, Tensor, "
      "Tensor, "
      "Tensor)");
  m.def(
      "attention_csr_by_source(Tensor rowptr, Tensor col, Tensor edge, Tensor value, Tensor? key, Tensor? query, "
      "Tensor? edge_attr, Tensor? "
      "edge_weight, Tensor? att, Tensor? edge_key, int form, int heads, float slope, float scale, float p, int seed, "
      "Tensor lse, Tensor delta, Tensor grad, Tensor? grad_z) -> (Tensor, Tensor)");

  // y[r] = x[index[r]]
  m.def("gather_rows(Tensor x, Tensor index) -> Tensor");
  m.def("gather_rows_into(Tensor(a!) out, Tensor x, Tensor index) -> ()");
  // out[index[r]] += rows[r], in the order of r
  m.def("scatter_add_rows(Tensor(a!) out, Tensor index, Tensor rows) -> ()");

  // Random numbers that depend on (seed, key[i], column) alone: formats/keyed.h
  m.def("keyed_dropout(Tensor x, Tensor key, float p, int seed, int column_offset) -> Tensor");
  m.def("keyed_uniform(Tensor key, int num_columns, int seed, int column_offset, ScalarType dtype) -> Tensor");
  m.def("keyed_normal(Tensor key, int num_columns, int seed, int column_offset, ScalarType dtype) -> Tensor");

  // y[i] = what stands at place[i] of a permutation of [0, size): formats/permutation.h
  m.def("keyed_permutation(Tensor place, int size, int seed) -> Tensor");

  // `count` entries of each row[i] of a pattern, drawn by (seed, key[i]): their rowptr, columns and places:
  // cpu/sample_rows.h
  m.def(
      "sample_rows(Tensor rowptr, Tensor col, Tensor? place, Tensor row, Tensor key, int count, bool replace, int "
      "seed) "
      "-> (Tensor, Tensor, Tensor)");

  // The rows and columns of a pattern that two lists name, the columns ascending, numbered by their places there:
  // rowptr, col, where each entry stood; and the transpose with the places in these: problems/patterns.h
  m.def(
      "restrict_csr(Tensor rowptr, Tensor col, Tensor row, Tensor column, int num_cols) -> (Tensor, Tensor, Tensor, "
      "Tensor, Tensor, Tensor)");
  // The transpose, and where each of its entries stood
  m.def("transpose_csr(Tensor rowptr, Tensor col, int num_cols) -> (Tensor, Tensor, Tensor)");
  // Whether the first two of that are its arguments, of a square matrix, which is found out without making them
  m.def("equals_transpose_csr(Tensor rowptr, Tensor col) -> bool");
  // y[k] = i where sorted[i] = value[k], or -1
  m.def("find_sorted(Tensor sorted, Tensor value) -> Tensor");
  // Where each value that is not known comes first, by ascending value, and the place of each value among the known
  // ones and, behind them, these: cpu/distinct.h
  m.def("distinct(Tensor known, Tensor value) -> (Tensor, Tensor)");
  // The distinct values without a place, and some with one, ascending, which get the next ones: cpu/add_places.h
  m.def("add_places(Tensor(a!) place_of, Tensor value, int next, Tensor? again) -> Tensor");
  // The numbers of values, given lists of ids of groups, whose numbers ascend, and single ones: cpu/find_numbers.h
  m.def(
      "find_numbers(Tensor id, Tensor count, Tensor first, Tensor given, Tensor given_number, Tensor value) -> Tensor");
  // Lists of rows of ids as bytes, with the bytes of each list; and back, with the rows of each: cpu/id_lists.h
  m.def("encode_ids(Tensor rows, Tensor count, bool is_ascending) -> (Tensor, Tensor)");
  m.def("decode_ids(Tensor content, Tensor num_bytes, int num_columns, bool is_ascending) -> (Tensor, Tensor)");
  // The column of each row in a maximum matching of rows and columns along the entries, or -1; and which rows and
  // columns alternating paths reach from those without a partner: problems/bipartite_matching.h
  m.def("bipartite_matching(Tensor rowptr, Tensor col, int num_cols) -> (Tensor, Tensor, Tensor)");

  // y = dropout(relu(norm(x) * weight + bias)), mean, 1 / deviation; norm: 0 none, 1 layer, 2 RMS; without a key
  // dropout drops nothing and only scales. The gradients by x, and by weight and bias in [:, 0] and [:, 1] of partial
  // sums [groups, 3, columns], compute all else again: problems/norm_relu_dropout.h
  m.def(
      "norm_relu_dropout(Tensor x, Tensor? weight, Tensor? bias, Tensor? key, int norm, float eps, bool relu, float p, "
      "int "
      "seed, int column_offset) -> (Tensor, Tensor, Tensor)");
  m.def(
      "norm_relu_dropout_grad(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, Tensor? "
      "key, "
      "int norm, bool relu, float p, int seed, int column_offset, bool is_part) -> (Tensor, Tensor, Tensor)");
  // Where x are some columns of the rows: mean and mean square of these; y for moments of all. The gradient of a part
  // is that by norm(x), with its row sums [rows, 2]; given the means over all columns, it becomes that by x
  m.def("row_moments(Tensor x, int norm) -> (Tensor, Tensor)");
  m.def(
      "norm_relu_dropout_of(Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, Tensor? key, int norm, "
      "bool "
      "relu, float p, int seed, int column_offset) -> Tensor");
  m.def("row_norm_grad_(Tensor(a!) by_n, Tensor x, Tensor mean, Tensor rstd, Tensor by_row, int norm) -> ()");

  // zero where x < 0, else x; and where x passes ([elements] bytes, or none); the gradient there, zero elsewhere
  m.def("relu(Tensor x, bool keeps_mask) -> (Tensor, Tensor)");
  m.def("relu_grad(Tensor grad, Tensor passed) -> Tensor");

  // Uninitialised, where outputs of ops lie: ops/allocate.h. The bytes of large outputs, in use and waiting to be used
  // again; and these given back to the system
  m.def("empty_rows(Tensor like, int num_rows, int num_columns) -> Tensor");
  m.def("block_bytes() -> (int, int)");
  m.def("release_blocks() -> ()");

  // Rows of messages in 2, 4, 8 or 16 bits a value: formats/packed_rows.h. Row i is the sum, over e in [rowptr[i],
  // rowptr[i + 1]), of weight[e] * col_scale[col[e]] * x[col[e]], and bad_row[0] the first one that is not finite, or
  // -1; and out[i] += row_scale[i] * sum_e weight[e] * row col[e]
  m.def(
      "quantize_csr_into(Tensor(a!) packed, Tensor(b!) bad_row, Tensor rowptr, Tensor col, Tensor x, Tensor? weight, "
      "Tensor? col_scale, int bits, Tensor? key, int seed) -> ()");
  m.def(
      "dequantize_csr_add(Tensor(a!) out, Tensor rowptr, Tensor col, Tensor packed, Tensor? weight, Tensor? "
      "row_scale, int bits) -> ()");

  // Raises what ops that did not wait for their device have found there since: an index out of range
  m.def("raise_bad_index() -> ()");

  // The instruction set in use, that of each device there are kernels for, and how the library was built
  m.def("isa() -> str");
  m.def("devices() -> str");
  m.def("build_info() -> str");
  // Bytes of the third-level cache, by a folder like Linux' /sys/devices/system/cpu/cpu0/cache or the C library; or 0
  m.def("last_cache_bytes(str caches) -> int");
}
