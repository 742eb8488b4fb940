// Drafts from a request's own text: the continuation of the longest suffix that occurred before, by suffix automata.
//
// An online suffix automaton per slot (Blumer et al. 1985): the suffix link of the state of the whole text is the
// longest suffix that has occurred before, so nothing is searched. ops/suffix.py has the same by brute force.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "acceptance.h"
#include "faser_cpu.h"
#include "sigmoid.h"

namespace faser {
namespace {

constexpr int32_t kNone = -1;
constexpr int32_t kBegin = -2, kEnd = -3;  // outside any vocabulary; at the ends of a prediction and before the output
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

// How often the likeliest continuation was right, by sampling mode, match length and its support: one occurrence,
// several that agree, several that do not, or a prediction.
constexpr int32_t kLengths = 6, kSupports = 4, kPredicted = 3;
constexpr int32_t kLengthFrom[kLengths] = {1, 2, 3, 4, 8, 16};
constexpr double kInitialRates[kLengths] = {0.3, 0.6, 0.7, 0.8, 0.87, 0.9};
constexpr double kPredictedRates[kLengths] = {0.6, 0.85, 0.9, 0.93, 0.95, 0.97};
constexpr double kInitialTests = 8.0;     // weight of the initial rates
constexpr double kCellTests = 2000.0;     // number of tests after which old ones weigh 1 / e
constexpr double kOffsetPrecision = 4.0;  // prior precision of a request's log-odds offset, which is 0 at first
constexpr double kOffsetInfo = 40.0;      // limit on the information about it, since a text changes
constexpr double kLeastSurvival = 0.1;    // of a draft that may still be worth a row
constexpr double kMaxLogOdds = 13.8;

constexpr double kInitialModelRate = 0.82, kRequestTests = 8.0;  // of the draft model, and its weight
constexpr double kModelTests = 600.0;

struct Cell {
  double tests = kInitialTests, passed = 0.0;
};

// Adds to a count of tests and of those passed, with forgetting.
void add_test(Cell* cell, double tests, double passed, double memory) {
  const double kept = std::max(0.0, 1.0 - tests / memory);
  cell->tests = kept * cell->tests + tests;
  cell->passed = kept * cell->passed + passed;
}

double log_odds(double p) { return std::log(p / (1.0 - p)); }

double log_odds_of(const Cell& cell) {
  const double p = cell.passed / cell.tests;
  return log_odds(std::min(std::max(p, 0.001), 0.999));
}

struct Slot {
  Automaton automaton;
  std::vector<int32_t> prediction;  // between kBegin and kEnd, or empty; the automaton begins with it
  bool only_prediction = false;     // the request's own text is not drafted from
  int32_t first = 0, num_seen = 0;  // positions in the text where the automaton begins and ends
  double offset = 0.0, info = 0.0;
  int64_t tested_before = -1, passed_before = 0;  // the slot's counts when the request began; -1: not yet known
  int64_t model_tested = 0, model_passed = 0;     // the request's own counts that were added to the model's cell
};

}  // namespace
}  // namespace faser

struct faser_suffix {
  std::vector<faser::Slot> slots;
  int32_t max_tokens;
  faser::Cell cells[faser::kNumModes][faser::kSupports][faser::kLengths];
  faser::Cell model[faser::kNumModes];
};

namespace faser {
namespace {

Cell& cell_of(faser_suffix& suffix, int32_t mode, const Automaton& automaton, const Match& match, bool is_predicted) {
  int32_t length = 0;
  while (length + 1 < kLengths && match.len >= kLengthFrom[length + 1]) ++length;
  if (is_predicted) return suffix.cells[mode][kPredicted][length];
  const State& state = automaton.state(match);
  const int32_t support = state.num_followers == 1 ? 0 : automaton.best(match).count == state.num_followers ? 1 : 2;
  return suffix.cells[mode][support][length];
}

bool is_predicted(const Slot& slot, const Match& match) {
  return slot.automaton.is_within(match, static_cast<int32_t>(slot.prediction.size()));
}

// Starts the automaton again, at this position of the text.
void begin(Slot& slot, int32_t first) {
  slot.automaton.clear();
  for (const int32_t token : slot.prediction) slot.automaton.append(token);
  slot.first = first;
}

// Appends a token; the output is assumed to begin as the prediction does.
void append(Slot& slot, const faser_sampling& s, int32_t position) {
  slot.automaton.append(s.tokens[position]);
  if (position + 1 == s.prompt_len && !slot.prediction.empty()) slot.automaton.append(kBegin);
}

// Learns from a committed token if the draft for it would have been right, whichever drafter made drafts.
void score(faser_suffix& suffix, Slot& slot, int32_t mode, int32_t token) {
  const Match match = slot.automaton.match();
  if (match.len == 0 || slot.automaton.best(match).token < 0) return;
  Cell& cell = cell_of(suffix, mode, slot.automaton, match, is_predicted(slot, match));
  const double y = slot.automaton.best(match).token == token ? 1.0 : 0.0;
  const double p = sigmoid(log_odds_of(cell) + slot.offset);
  slot.info = std::min(slot.info + p * (1.0 - p), kOffsetInfo);
  slot.offset += (y - p) / (slot.info + kOffsetPrecision);
  add_test(&cell, 1.0, y, kCellTests);
}

void catch_up(faser_suffix& suffix, Slot& slot, const faser_sampling& s, int32_t num_tokens) {
  if (slot.num_seen > num_tokens || slot.num_seen == 0) {
    begin(slot, 0);
    slot.num_seen = 0;
  }
  if (num_tokens - slot.num_seen > suffix.max_tokens) {  // a prompt longer than the limit
    begin(slot, num_tokens - suffix.max_tokens);
    slot.num_seen = slot.first;
  }
  for (int32_t t = slot.num_seen; t < num_tokens; ++t) {
    if (t >= s.prompt_len) score(suffix, slot, s.mode, s.tokens[t]);
    if (t - slot.first >= suffix.max_tokens) {  // full: start again with the later half
      begin(slot, t - suffix.max_tokens / 2);
      for (int32_t u = slot.first; u < t; ++u) append(slot, s, u);
    }
    append(slot, s, t);
    slot.num_seen = t + 1;
  }
}

// Returns the acceptance rate of the draft model's next draft, from the request's drafts verified so far.
double model_rate(faser_suffix& suffix, Slot& slot, const faser_sampling& s) {
  Cell& cell = suffix.model[s.mode];
  if (slot.tested_before < 0) {
    slot.tested_before = s.num_tested[FASER_BY_MODEL];
    slot.passed_before = s.num_passed[FASER_BY_MODEL];
  }
  const int64_t tested = s.num_tested[FASER_BY_MODEL] - slot.tested_before;
  const int64_t passed = s.num_passed[FASER_BY_MODEL] - slot.passed_before;
  if (tested > slot.model_tested) {
    add_test(&cell, static_cast<double>(tested - slot.model_tested), static_cast<double>(passed - slot.model_passed),
             kModelTests);
  }
  slot.model_tested = tested;
  slot.model_passed = passed;
  return (static_cast<double>(passed) + kRequestTests * cell.passed / cell.tests) /
         (static_cast<double>(tested) + kRequestTests);
}

int32_t draft(faser_suffix& suffix, Slot& slot, faser_sampling& s, int32_t num_tokens, int32_t num_drafts,
              int32_t num_new, int32_t num_model) {
  const double rival = model_rate(suffix, slot, s);
  Match match = slot.automaton.match();
  for (int32_t j = 0; j < num_drafts; ++j) match = slot.automaton.advance(match, s.tokens[num_tokens + j]);
  double survival = 1.0;
  int32_t count = 0;
  for (; count < num_new && match.len > 0; ++count) {
    const bool predicted = is_predicted(slot, match);
    if (slot.automaton.best(match).token < 0 || (slot.only_prediction && !predicted)) break;
    const double odds = log_odds_of(cell_of(suffix, s.mode, slot.automaton, match, predicted)) + slot.offset;
    const double p = sigmoid(odds);
    survival *= p;
    if (survival < kLeastSurvival || (num_drafts + count < num_model && p < rival)) break;
    const int32_t position = num_tokens + num_drafts + count, token = slot.automaton.best(match).token;
    s.tokens[position] = token;
    s.draft_sources[position] = predicted ? FASER_BY_PREDICTION : FASER_BY_SUFFIX;
    if (s.draft_margins != nullptr) {
      s.draft_margins[position] = static_cast<float>(std::min(std::max(odds, -kMaxLogOdds), kMaxLogOdds));
    }
    if (s.draft_candidates != nullptr) {
      int32_t* candidates = s.draft_candidates + static_cast<size_t>(position) * FASER_NUM_CANDIDATES;
      std::fill(candidates, candidates + FASER_NUM_CANDIDATES, -1);
      candidates[0] = token;
    }
    match = slot.automaton.advance(match, token);
  }
  return count;
}

}  // namespace
}  // namespace faser

faser_suffix* faser_suffix_create(int32_t max_batch_size, int32_t max_tokens, int32_t* status) {
  if (max_batch_size < 1 || max_tokens < 2) {
    *status = FASER_BAD_ARGUMENT;
    return nullptr;
  }
  try {
    faser_suffix* suffix = new faser_suffix();
    suffix->max_tokens = max_tokens;
    for (auto& mode : suffix->cells) {
      for (int32_t support = 0; support < faser::kSupports; ++support) {
        const double* rates = support == faser::kPredicted ? faser::kPredictedRates : faser::kInitialRates;
        for (int32_t i = 0; i < faser::kLengths; ++i) mode[support][i].passed = faser::kInitialTests * rates[i];
      }
    }
    for (faser::Cell& cell : suffix->model) cell.passed = faser::kInitialTests * faser::kInitialModelRate;
    suffix->slots.resize(static_cast<size_t>(max_batch_size));
    *status = FASER_OK;
    return suffix;
  } catch (const std::bad_alloc&) {
    *status = FASER_OUT_OF_MEMORY;
    return nullptr;
  }
}

void faser_suffix_destroy(faser_suffix* suffix) { delete suffix; }

int64_t faser_suffix_memory_bytes(const faser_suffix* suffix) {
  size_t bytes = sizeof(faser_suffix) + suffix->slots.capacity() * sizeof(faser::Slot);
  for (const faser::Slot& slot : suffix->slots) {
    bytes += slot.automaton.memory_bytes() + slot.prediction.capacity() * sizeof(int32_t);
  }
  return static_cast<int64_t>(bytes);
}

int32_t faser_suffix_reset(faser_suffix* suffix, int32_t slot) {
  if (slot < 0 || static_cast<size_t>(slot) >= suffix->slots.size()) return FASER_BAD_ARGUMENT;
  suffix->slots[static_cast<size_t>(slot)] = faser::Slot();
  return FASER_OK;
}

int32_t faser_suffix_predict(faser_suffix* suffix, int32_t slot, const int32_t* tokens, int32_t num_tokens,
                             int32_t only_prediction) {
  if (slot < 0 || static_cast<size_t>(slot) >= suffix->slots.size() || num_tokens < 1) return FASER_BAD_ARGUMENT;
  if (*std::min_element(tokens, tokens + num_tokens) < 0) return FASER_BAD_TOKEN;
  faser::Slot& found = suffix->slots[static_cast<size_t>(slot)];
  found = faser::Slot();
  found.only_prediction = only_prediction != 0;
  try {
    found.prediction.reserve(static_cast<size_t>(num_tokens) + 2);
    found.prediction.push_back(faser::kBegin);
    found.prediction.insert(found.prediction.end(), tokens, tokens + num_tokens);
    found.prediction.push_back(faser::kEnd);
  } catch (const std::bad_alloc&) {
    found = faser::Slot();
    return FASER_OUT_OF_MEMORY;
  }
  return FASER_OK;
}

int32_t faser_suffix_draft(faser_suffix* suffix, int32_t num_requests, const int32_t* slots, faser_sampling* sampling,
                           const int32_t* num_tokens, const int32_t* num_drafts, const int32_t* num_new_drafts,
                           const int32_t* num_model, int32_t* out_num_new) {
  for (int32_t i = 0; i < num_requests; ++i) {
    if (slots[i] < 0 || static_cast<size_t>(slots[i]) >= suffix->slots.size()) return FASER_BAD_ARGUMENT;
    const faser_sampling& s = sampling[slots[i]];
    if (s.tokens == nullptr || s.draft_sources == nullptr || num_tokens[i] <= 0 || num_drafts[i] < 0 ||
        num_new_drafts[i] < 0) {
      return FASER_BAD_ARGUMENT;
    }
  }
  for (int32_t i = 0; i < num_requests; ++i) {
    out_num_new[i] = 0;
    if (num_new_drafts[i] == 0) continue;
    faser::Slot& slot = suffix->slots[static_cast<size_t>(slots[i])];
    faser_sampling& s = sampling[slots[i]];
    try {
      faser::catch_up(*suffix, slot, s, num_tokens[i]);
    } catch (const std::bad_alloc&) {
      slot = faser::Slot();
      return FASER_OUT_OF_MEMORY;
    }
    out_num_new[i] = faser::draft(*suffix, slot, s, num_tokens[i], num_drafts[i], num_new_drafts[i], num_model[i]);
  }
  return FASER_OK;
}
