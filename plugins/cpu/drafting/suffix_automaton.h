// An online suffix automaton (Blumer et al. 1985): the suffix link of the state of the whole text is the longest suffix
// that has occurred before, so nothing is searched.
#ifndef FASER_CPU_SUFFIX_AUTOMATON_H_
#define FASER_CPU_SUFFIX_AUTOMATON_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace faser {

constexpr int32_t kNone = -1;
constexpr int32_t kMaxLinks = 64;  // contexts that count an old continuation; limits the time of repeated tokens

struct Edge {
  int32_t state, token, to;
  int32_t next;   // the next edge of the same state
  int32_t count;  // how often the token followed
};

struct State {
  int32_t len, link;
  int32_t first, best;  // edges; best: the most frequent one, on ties the latest
  int32_t num_followers;
  int32_t end;  // position in the text where its strings first ended
};

// A state with a length: the longest suffix of some text that was followed by a token before.
struct Match {
  int32_t state, len;
};

class Automaton {
 public:
  void clear() {
    std::vector<State>().swap(states_);
    std::vector<Edge>().swap(edges_);
    std::vector<int32_t>().swap(table_);
    last_ = 0;
  }

  int32_t num_tokens() const { return states_.empty() ? 0 : states_[static_cast<size_t>(last_)].len; }

  size_t memory_bytes() const {
    return states_.capacity() * sizeof(State) + edges_.capacity() * sizeof(Edge) + table_.capacity() * sizeof(int32_t);
  }

  void append(int32_t token) {
    if (states_.empty()) new_state({0, kNone, kNone, kNone, 0, 0});
    const int32_t end = states_[at(last_)].len + 1;
    const int32_t current = new_state({end, kNone, kNone, kNone, 0, end});
    int32_t p = last_, edge = kNone;
    while (p != kNone && (edge = find(p, token)) == kNone) {
      follow(p, new_edge(p, token, current));
      p = states_[at(p)].link;
    }
    last_ = current;
    if (p == kNone) {
      states_[at(current)].link = 0;
      return;
    }
    const int32_t seen = edges_[at(edge)].to;
    if (states_[at(p)].len + 1 == states_[at(seen)].len) {
      states_[at(current)].link = seen;
    } else {
      const int32_t copy = clone(seen, states_[at(p)].len + 1);
      for (int32_t r = p; r != kNone && (edge = find(r, token)) != kNone && edges_[at(edge)].to == seen;) {
        edges_[at(edge)].to = copy;
        r = states_[at(r)].link;
      }
      states_[at(seen)].link = states_[at(current)].link = copy;
    }
    for (int32_t links = 0; p > 0 && links < kMaxLinks; ++links) {
      follow(p, find(p, token));
      p = states_[at(p)].link;
    }
  }

  // The match of the whole text.
  Match match() const {
    if (states_.empty() || last_ == 0) return {0, 0};
    const int32_t state = states_[at(last_)].link;
    return {state, states_[at(state)].len};
  }

  Match advance(Match match, int32_t token) const {
    if (states_.empty()) return {0, 0};
    int32_t edge;
    while ((edge = find(match.state, token)) == kNone) {
      match.state = states_[at(match.state)].link;
      if (match.state == kNone) return {0, 0};
      match.len = states_[at(match.state)].len;
    }
    match = {edges_[at(edge)].to, match.len + 1};
    while (match.state != 0 && states_[at(match.state)].num_followers == 0) {
      match.state = states_[at(match.state)].link;
      match.len = states_[at(match.state)].len;
    }
    return match;
  }

  const State& state(const Match& match) const { return states_[at(match.state)]; }
  const Edge& best(const Match& match) const { return edges_[at(state(match).best)]; }
  // True if the match and its most frequent continuation occur within the first num_tokens tokens.
  bool is_within(const Match& match, int32_t num_tokens) const {
    return num_tokens > 0 && states_[at(best(match).to)].end <= num_tokens;
  }

 private:
  static size_t at(int32_t index) { return static_cast<size_t>(index); }

  size_t home(int32_t state, int32_t token) const {
    const uint64_t key = (static_cast<uint64_t>(static_cast<uint32_t>(state)) << 32) | static_cast<uint32_t>(token);
    return static_cast<size_t>((key * 0x9E3779B97F4A7C15ull) >> 32) & (table_.size() - 1);
  }

  int32_t find(int32_t state, int32_t token) const {
    if (table_.empty()) return kNone;
    for (size_t i = home(state, token);; i = (i + 1) & (table_.size() - 1)) {
      const int32_t index = table_[i];
      if (index == kNone) return kNone;
      const Edge& edge = edges_[at(index)];
      if (edge.state == state && edge.token == token) return index;
    }
  }

  void insert(int32_t index) {
    size_t i = home(edges_[at(index)].state, edges_[at(index)].token);
    while (table_[i] != kNone) i = (i + 1) & (table_.size() - 1);
    table_[i] = index;
  }

  int32_t new_state(const State& state) {
    states_.push_back(state);
    return static_cast<int32_t>(states_.size()) - 1;
  }

  int32_t new_edge(int32_t state, int32_t token, int32_t to) {
    const int32_t index = static_cast<int32_t>(edges_.size());
    edges_.push_back({state, token, to, states_[at(state)].first, 0});
    states_[at(state)].first = index;
    if (2 * edges_.size() > table_.size()) {
      table_.assign(std::max<size_t>(64, 2 * table_.size()), kNone);
      for (int32_t i = 0; i < index; ++i) insert(i);
    }
    insert(index);
    return index;
  }

  int32_t clone(int32_t seen, int32_t len) {
    State state = states_[at(seen)];
    const int32_t best = state.best, first = state.first;
    state.len = len;
    state.first = state.best = kNone;
    const int32_t copy = new_state(state);
    for (int32_t e = first; e != kNone; e = edges_[at(e)].next) {
      const int32_t twin = new_edge(copy, edges_[at(e)].token, edges_[at(e)].to);
      edges_[at(twin)].count = edges_[at(e)].count;
      if (e == best) states_[at(copy)].best = twin;
    }
    return copy;
  }

  // Counts one more time that the edge's token followed the state's strings.
  void follow(int32_t state, int32_t edge) {
    State& s = states_[at(state)];
    ++s.num_followers;
    const int32_t count = ++edges_[at(edge)].count;
    if (s.best == kNone || count >= edges_[at(s.best)].count) s.best = edge;
  }

  std::vector<State> states_;  // the first is the root, the empty string
  std::vector<Edge> edges_;
  std::vector<int32_t> table_;  // hash table of edges by state and token, open addressing
  int32_t last_ = 0;
};

}  // namespace faser

#endif  // FASER_CPU_SUFFIX_AUTOMATON_H_
