// Drafts from a request's own text: the continuation of the longest suffix that occurred before, by suffix automata.
//
// ops/suffix.py has the same by brute force.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "acceptance.h"
#include "faser_cpu.h"
#include "sigmoid.h"
#include "suffix_automaton.h"

namespace faser {
namespace {

constexpr int32_t kBegin = -2, kEnd = -3;  // outside any vocabulary; at the ends of a prediction and before the output

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
