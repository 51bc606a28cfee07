/*! \file passes/fusion_rules.h
 *  \brief TVM's operator fusion rules over plain arrays: what relax.transform.FuseOps would group.
 */
#ifndef TVMHET_PASSES_FUSION_RULES_H_
#define TVMHET_PASSES_FUSION_RULES_H_

#include <cstdint>
#include <vector>

namespace tvmhet {

/*! \brief TVM's pattern kinds, in its own numbering. A kind above kOutEWiseFusable never fuses. */
enum FusionKind : int {
  kElemWise = 0,
  kBroadcast = 1,
  kInjective = 2,
  kCommReduce = 3,
  kOutEWiseFusable = 4,
  kOpaque = 8,
};

/*! \brief Operators in topological order, as far as fusion looks at them. */
struct FusionGraph {
  std::vector<int> kind;
  std::vector<std::vector<int>> consumers;  // consumers[u]: ascending, each greater than u
  std::vector<char> escapes;  // the model returns a result of u, or someone outside reads it
  std::vector<char> is_multi_output;  // results are read through tuple-get-item, an injective step

  int size() const { return static_cast<int>(kind.size()); }
};

/*! \brief Group `graph` as FuseOps does; return each operator's group as the index of its last one.
 *  \param max_depth  refuse groups of more operators (relax.FuseOps.max_depth, 256 by default). */
std::vector<int> FuseGreedily(const FusionGraph& graph, int64_t max_depth);

}  // namespace tvmhet
#endif  // TVMHET_PASSES_FUSION_RULES_H_
