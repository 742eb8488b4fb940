// Products of pairs by their parts, whose number and meaning depend on the instruction set, and tiles of rows.
namespace faser {
namespace {

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Calls body(Constant<value>) for each value below kEnd.
template <int kEnd, int kValue = 0, typename Body>
inline void for_constants(Body&& body) {
  if constexpr (kValue < kEnd) {
    body(Constant<kValue>{});
    for_constants<kEnd, kValue + 1>(body);
  }
}

// Calls body(Constant<part>) for each part of a pair.
template <typename Body>
inline void for_parts(Body&& body) {
  for_constants<kParts>(body);
}

constexpr int kChunkRows = 48;  // rows that are multiplied with a panel together: whole tiles on every instruction set

// acc [R][V] += products of V vectors of weights and R rows of inputs, weights_of(part, v) and input_of(part, r).
// The smaller number of them stays in registers.
template <int R, int V, typename WeightsOf, typename InputOf>
inline void add_products(F (*acc)[V], const WeightsOf& weights_of, const InputOf& input_of) {
  for_parts([&](auto part) {
    if constexpr (R < V) {
      Part inputs[R];
      for (int r = 0; r < R; r++) inputs[r] = input_of(part, r);
      for (int v = 0; v < V; v++) {
        const Part weights = weights_of(part, v);
        for (int r = 0; r < R; r++) acc[r][v] = add_product(acc[r][v], weights, inputs[r]);
      }
    } else {
      Part weights[V];
      for (int v = 0; v < V; v++) weights[v] = weights_of(part, v);
      for (int r = 0; r < R; r++) {
        const Part input = input_of(part, r);
        for (int v = 0; v < V; v++) acc[r][v] = add_product(acc[r][v], weights[v], input);
      }
    }
  });
}

// Calls body(Constant<count>) for a count from 1 to kMax.
template <int kMax, typename Body>
inline void with_count(int count, Body&& body) {
  if constexpr (kMax > 1)
    if (count < kMax) return with_count<kMax - 1>(count, body);
  body(Constant<kMax>{});
}

// Calls body(first_row, Constant<num_rows>) on tiles of nearly equal size, at most kMax rows, since a short tile
// reuses weights poorly.
template <int kMax, typename Body>
inline void for_row_tiles(int num_rows, Body&& body) {
  const int num_tiles = (num_rows + kMax - 1) / kMax;
  for (int tile = 0, row = 0; tile < num_tiles; tile++) {
    const int count = (num_rows - row + num_tiles - tile - 1) / (num_tiles - tile);
    with_count<kMax>(count, [&](auto rows) { body(row, rows); });
    row += count;
  }
}

// acc + low(weights) * low(x) + high(weights) * high(x)
inline F dot(F acc, U weights, const Pair* x) {
  for_parts([&](auto part) { acc = add_product(acc, weights_part<part.value>(weights), input_part<part.value>(x)); });
  return acc;
}

}  // namespace
}  // namespace faser
