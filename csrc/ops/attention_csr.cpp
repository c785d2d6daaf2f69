#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "cpu/attention.h"
#include "ops/allocate.h"
#include "ops/csr.h"
#include "ops/rows.h"

namespace pyg_dist {
namespace {

// What the three ops take alike.
struct Inputs {
  const Tensor &rowptr, &col, &edge, &value;
  const MaybeTensor &key, &query, &edge_attr, &edge_weight, &att, &edge_key;
  int64_t form, heads;
  double slope, scale, p;
  int64_t seed;
  const MaybeTensor &far_value, &far_key;
};

OnDevice device_of_inputs(const char* op, const Inputs& in) {
  return device_of(op, in.value, in.rowptr, in.col, in.edge, in.key, in.query, in.edge_attr, in.edge_weight, in.att,
                   in.edge_key, in.far_value, in.far_key);
}

struct Rows {
  const void* data = nullptr;
  int64_t stride = 0;
};

// Optional rows in the dtype of `value`: of num_rows, or of any number where that is negative.
Rows rows_of(const char* op, const char* name, const MaybeTensor& tensor, const Tensor& value, int64_t num_rows,
             int64_t num_columns) {
  if (!tensor) return {};
  check_rows(op, name, *tensor);
  check_same_dtype(op, name, *tensor, "value", value);
  check_shape(op, name, *tensor, num_rows < 0 ? tensor->size(0) : num_rows, num_columns);
  return {tensor->const_data_ptr(), tensor->stride(0)};
}

void require(const char* op, const char* name, bool is_given, bool is_wanted) {
  PYG_DIST_CHECK(is_given == is_wanted, op, ": expected ", is_wanted ? "" : "no ", "'", name,
                 "' with this form of attention, got ", is_given ? "one" : "none");
}

Attention problem_of(const char* op, const OnDevice& device, const Inputs& in, int64_t num_targets) {
  check_csr(op, device, in.rowptr, in.col);
  check_vector(op, "edge", in.edge, ScalarType::Int, in.col.size(0));
  check_rows(op, "value", in.value);
  PYG_DIST_CHECK(in.form >= 0 && in.form <= 2, op, ": expected 'form' to be 0 (additive), 1 (dynamic) or 2 (dot), got ",
                 in.form);
  PYG_DIST_CHECK(in.heads >= 1 && in.heads <= kMaxHeads && in.value.size(1) % in.heads == 0, op,
                 ": expected 'heads' to lie in [1, ", kMaxHeads, "] and to divide the ", in.value.size(1),
                 " columns of 'value', got ", in.heads);
  PYG_DIST_CHECK(in.slope >= 0, op, ": expected 'slope' not to be negative, got ", in.slope);
  PYG_DIST_CHECK(in.p >= 0 && in.p < 1, op, ": expected 'p' to lie in [0, 1), got ", in.p);
  const auto form = static_cast<AttentionForm>(in.form);
  const Element element = element_of(op, "value", in.value.scalar_type());
  const bool is_dynamic = form == AttentionForm::dynamic, has_edges = in.edge_attr.has_value();
  require(op, "key", in.key.has_value(), !is_dynamic);
  PYG_DIST_CHECK(in.far_value.has_value() || !in.far_key.has_value(), op,
                 ": expected 'far_value' where there is 'far_key', got none");
  require(op, "far_key", in.far_key.has_value(), in.far_value.has_value() && !is_dynamic);
  require(op, "att", in.att.has_value(), is_dynamic);
  require(op, "edge_weight", in.edge_weight.has_value(), has_edges);
  if (form != AttentionForm::additive) require(op, "query", in.query.has_value(), true);
  Attention problem{
      .rowptr = static_cast<const int64_t*>(in.rowptr.const_data_ptr()),
      .col = static_cast<const int32_t*>(in.col.const_data_ptr()),
      .edge = static_cast<const int32_t*>(in.edge.const_data_ptr()),
      .num_rows = in.rowptr.size(0) - 1,
      .num_edges = in.col.size(0),
      .first_row = 0,
      .value = in.value.const_data_ptr(),
      .key = nullptr,
      .query = nullptr,
      .edge_attr = nullptr,
      .edge_weight = nullptr,
      .att = vector_data(op, "att", in.att, element, in.value.size(1)),
      .value_stride = in.value.stride(0),
      .key_stride = 0,
      .query_stride = 0,
      .edge_attr_stride = 0,
      .edge_weight_stride = 0,
      .far_value = nullptr,
      .far_key = nullptr,
      .far_value_stride = 0,
      .far_key_stride = 0,
      .num_near = in.value.size(0),
      .edge_key = nullptr,
      .seed = static_cast<uint64_t>(in.seed),
      .threshold = static_cast<uint32_t>(std::min(std::nearbyint(std::ldexp(in.p, 32)), 0x1p32 - 1)),
      .num_heads = in.heads,
      .num_columns = in.value.size(1) / in.heads,
      .num_edge_columns = has_edges ? in.edge_attr->size(1) : 0,
      .slope = in.slope,
      .scale = in.scale,
      .dropout_scale = 1 / (1 - in.p),
      .form = form,
      .element = element,
      .scratch = nullptr,
  };
  const Rows key = rows_of(op, "key", in.key, in.value, in.value.size(0), key_columns(problem));
  const int64_t num_far = in.far_value ? in.far_value->size(0) : 0;
  const Rows far_value = rows_of(op, "far_value", in.far_value, in.value, num_far, in.value.size(1));
  const Rows far_key = rows_of(op, "far_key", in.far_key, in.value, num_far, key_columns(problem));
  PYG_DIST_CHECK(problem.num_near + num_far > 0 || in.col.size(0) == 0, op, ": expected 'value' to have rows for ",
                 in.col.size(0), " edges, got none");
  const Rows query = rows_of(op, "query", in.query, in.value, num_targets, logit_columns(problem));
  const Rows attr = rows_of(op, "edge_attr", in.edge_attr, in.value, -1, problem.num_edge_columns);
  problem.key = key.data;
  problem.key_stride = key.stride;
  problem.far_value = far_value.data;
  problem.far_value_stride = far_value.stride;
  problem.far_key = far_key.data;
  problem.far_key_stride = far_key.stride;
  problem.query = query.data;
  problem.query_stride = query.stride;
  problem.edge_attr = attr.data;
  problem.edge_attr_stride = attr.stride;
  if (in.edge_weight && is_dynamic) {
    check_dense_rows(op, "edge_weight", *in.edge_weight);
    check_shape(op, "edge_weight", *in.edge_weight, problem.num_edge_columns, in.value.size(1));
    PYG_DIST_CHECK(in.edge_weight->scalar_type() == accumulator_dtype(element), op, ": expected 'edge_weight' to be ",
                   toString(accumulator_dtype(element)), ", got ", toString(in.edge_weight->scalar_type()));
    problem.edge_weight = in.edge_weight->const_data_ptr();
  } else if (in.edge_weight) {
    const bool is_shared = in.edge_weight->dim() == 2 && in.edge_weight->size(0) == 1;
    const Rows weight =
        rows_of(op, "edge_weight", in.edge_weight, in.value, is_shared ? 1 : num_targets, edge_sum_columns(problem));
    problem.edge_weight = weight.data;
    problem.edge_weight_stride = is_shared ? 0 : weight.stride;
  }
  if (in.edge_key && in.p > 0) {
    check_vector(op, "edge_key", *in.edge_key, ScalarType::Long);
    problem.edge_key = static_cast<const int64_t*>(in.edge_key->const_data_ptr());
  }
  return problem;
}

bool is_empty(const Attention& p) { return p.num_rows == 0; }

// What the gradients get beside.
struct Known {
  const Tensor &lse, &delta, &grad;
  const MaybeTensor& grad_z;
};

void check_sums(const char* op, const char* name, const Tensor& tensor, int64_t num_rows, int64_t width,
                ScalarType dtype) {
  check_dense_rows(op, name, tensor);
  check_shape(op, name, tensor, num_rows, width);
  PYG_DIST_CHECK(tensor.scalar_type() == dtype, op, ": expected '", name, "' to be ", toString(dtype), ", got ",
                 toString(tensor.scalar_type()));
}

AttentionGrad gradient_of(const char* op, const Attention& problem, const Tensor& value, const Known& known) {
  const int64_t num_targets = known.grad.size(0);
  const auto dense = [&](const char* name, const Tensor& tensor, int64_t width, ScalarType dtype) {
    check_sums(op, name, tensor, num_targets, width, dtype);
    return tensor.const_data_ptr();
  };
  const ScalarType sums = accumulator_dtype(problem.element);
  return {
      .attention = problem,
      .lse = dense("lse", known.lse, problem.num_heads, sums),
      .delta = dense("delta", known.delta, problem.num_heads, sums),
      .grad_y = dense("grad", known.grad, value.size(1), value.scalar_type()),
      .grad_z = known.grad_z ? dense("grad_z", *known.grad_z, edge_sum_columns(problem), value.scalar_type()) : nullptr,
      .by_query = nullptr,
      .by_edge_weight = nullptr,
      .by_edge_attr = nullptr,
      .by_parameters = nullptr,
      .by_value = nullptr,
      .by_key = nullptr,
      .wide = false,
  };
}

void attention_csr(Tensor y, Tensor z, Tensor lse, Tensor rowptr, Tensor col, Tensor edge, Tensor value,
                   MaybeTensor key, MaybeTensor query, MaybeTensor edge_attr, MaybeTensor edge_weight, MaybeTensor att,
                   MaybeTensor edge_key, int64_t form, int64_t heads, double slope, double scale, double p,
                   int64_t seed, MaybeTensor far_value, MaybeTensor far_key, bool is_part) {
  const char* op = "attention_csr";
  const Inputs in{rowptr,   col,  edge,  value, key,   query, edge_attr, edge_weight, att,
                  edge_key, form, heads, slope, scale, p,     seed,      far_value,   far_key};
  device_of(op, value, y, z, lse);
  const auto device = device_of_inputs(op, in);
  const Attention problem = problem_of(op, device, in, rowptr.size(0) - 1);
  const bool sums_edges = problem.form == AttentionForm::dot && edge_attr.has_value();
  check_sums(op, "y", y, problem.num_rows, value.size(1), value.scalar_type());
  check_sums(op, "z", z, sums_edges ? problem.num_rows : 0, edge_sum_columns(problem), value.scalar_type());
  check_sums(op, "lse", lse, problem.num_rows, heads, accumulator_dtype(problem.element));
  if (is_empty(problem)) return;
  device->attention({
      .attention = problem,
      .y = y.mutable_data_ptr(),
      .z = sums_edges ? z.mutable_data_ptr() : nullptr,
      .lse = lse.mutable_data_ptr(),
      .is_part = is_part,
      .wide = false,
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_csr_by_target(
    Tensor rowptr, Tensor col, Tensor edge, Tensor value, MaybeTensor key, MaybeTensor query, MaybeTensor edge_attr,
    MaybeTensor edge_weight, MaybeTensor att, MaybeTensor edge_key, int64_t form, int64_t heads, double slope,
    double scale, double p, int64_t seed, MaybeTensor far_value, MaybeTensor far_key, Tensor lse, Tensor delta,
    Tensor grad, MaybeTensor grad_z, bool by_edge_attr) {
  const char* op = "attention_csr_by_target";
  const Inputs in{rowptr,   col,  edge,  value, key,   query, edge_attr, edge_weight, att,
                  edge_key, form, heads, slope, scale, p,     seed,      far_value,   far_key};
  device_of(op, value, lse, delta, grad, grad_z);
  const auto device = device_of_inputs(op, in);
  const Attention problem = problem_of(op, device, in, rowptr.size(0) - 1);
  AttentionGrad gradient = gradient_of(op, problem, value, {lse, delta, grad, grad_z});
  PYG_DIST_CHECK(grad.size(0) == problem.num_rows, op, ": expected 'grad' to have the ", problem.num_rows,
                 " rows of the pattern, got ", grad.size(0));
  const bool is_dynamic = problem.form == AttentionForm::dynamic, has_edges = edge_attr.has_value();
  const bool weighs_edges = has_edges && !is_dynamic;
  const Tensor by_query = new_output(value, {problem.num_rows, logit_columns(problem)});
  const Tensor by_edge_weight = new_output(value, {weighs_edges ? problem.num_rows : 0, edge_sum_columns(problem)});
  const bool wants_attr = by_edge_attr && has_edges;
  const Tensor by_attr =
      torch::stable::new_zeros(value, {wants_attr ? edge_attr->size(0) : 0, problem.num_edge_columns});
  const Tensor by_parameters = torch::stable::new_zeros(
      value, {is_dynamic ? 1 + problem.num_edge_columns : 0, value.size(1)}, accumulator_dtype(problem.element));
  gradient.by_query = by_query.mutable_data_ptr();
  gradient.by_edge_weight = weighs_edges ? by_edge_weight.mutable_data_ptr() : nullptr;
  gradient.by_edge_attr = wants_attr ? by_attr.mutable_data_ptr() : nullptr;
  gradient.by_parameters = is_dynamic ? by_parameters.mutable_data_ptr() : nullptr;
  if (!is_empty(problem)) device->attention_by_target(gradient);
  return {by_query, by_edge_weight, by_attr, by_parameters};
}

std::tuple<Tensor, Tensor> attention_csr_by_source(Tensor rowptr, Tensor col, Tensor edge, Tensor value,
                                                   MaybeTensor key, MaybeTensor query, MaybeTensor edge_attr,
                                                   MaybeTensor edge_weight, MaybeTensor att, MaybeTensor edge_key,
                                                   int64_t form, int64_t heads, double slope, double scale, double p,
                                                   int64_t seed, Tensor lse, Tensor delta, Tensor grad,
                                                   MaybeTensor grad_z) {
  const char* op = "attention_csr_by_source";
  const MaybeTensor far_value, far_key;  // rows of the pattern are sources
  const Inputs in{rowptr,   col,  edge,  value, key,   query, edge_attr, edge_weight, att,
                  edge_key, form, heads, slope, scale, p,     seed,      far_value,   far_key};
  device_of(op, value, lse, delta, grad, grad_z);
  const auto device = device_of_inputs(op, in);
  const Attention problem = problem_of(op, device, in, grad.dim() > 0 ? grad.size(0) : 0);
  check_gathered(op, "grad", grad, col);
  PYG_DIST_CHECK(value.size(0) == problem.num_rows, op, ": expected 'value' to have the ", problem.num_rows,
                 " rows of the transposed pattern, got ", value.size(0));
  AttentionGrad gradient = gradient_of(op, problem, value, {lse, delta, grad, grad_z});
  const Tensor by_value = new_output(value, {problem.num_rows, value.size(1)});
  const Tensor by_key = new_output(value, {key ? problem.num_rows : 0, key_columns(problem)});
  gradient.by_value = by_value.mutable_data_ptr();
  gradient.by_key = key ? by_key.mutable_data_ptr() : nullptr;
  if (!is_empty(problem)) device->attention_by_source(gradient);
  return {by_value, by_key};
}

}  // namespace

PYG_DIST_OPS(m) {
  m.impl("attention_csr", TORCH_BOX(&attention_csr));
  m.impl("attention_csr_by_target", TORCH_BOX(&attention_csr_by_target));
  m.impl("attention_csr_by_source", TORCH_BOX(&attention_csr_by_source));
}

}  // namespace pyg_dist
