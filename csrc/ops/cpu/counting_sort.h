// Entries grouped by row. Knows no torch but its threads, so that a trial under sanitizers can run it.
#pragma once

#include "problems/csr_from_edges.h"

namespace pyg_dist::cpu {

EntriesScan scan_entries(const CsrFromEdges& problem);

// Of entries that are in order already, all of which are inside.
void copy_sorted(const CsrFromEdges& problem);

// Bytes of memory that sort_entries needs, on the boundary of eight.
int64_t sort_scratch(const CsrFromEdges& problem);

// Of entries in any order, all of which are inside.
void sort_entries(const CsrFromEdges& problem, void* scratch);

}  // namespace pyg_dist::cpu
