// How many threads share a pass. Results do not depend on it, so it may follow what was measured.
#ifndef FASER_TEAM_CHOOSER_H_
#define FASER_TEAM_CHOOSER_H_

#include <algorithm>
#include <cstdint>

namespace faser {

// Chooses between one thread and a team for passes of a similar size. A team is faster on idle cores and much slower
// where other processes hold one of them, since each barrier then waits for the scheduler; both change while we run.
class TeamChooser {
 public:
  bool use_team() {
    if (seconds_per_work_[0] == 0 && seconds_per_work_[1] != 0) return false;
    const bool best = seconds_per_work_[0] == 0 || seconds_per_work_[1] <= seconds_per_work_[0];
    if (++num_calls_ < probe_interval_) return best;
    num_calls_ = 0;
    return !best;
  }

  void record(bool team, double seconds_per_work) {
    const bool was_best = seconds_per_work_[1] <= seconds_per_work_[0];
    double& mean = seconds_per_work_[team];
    // A probe replaces what may be long out of date. One slow call of the usual choice proves nothing: where a thread
    // loses its core for a moment, a pass takes ten times as long, and the team would be given up for many passes.
    if (mean == 0 || team != was_best)
      mean = seconds_per_work;
    else
      mean += kWeight * (std::min(seconds_per_work, kMostSlower * mean) - mean);
    const bool is_best = seconds_per_work_[1] <= seconds_per_work_[0];
    if (is_best != was_best) {
      probe_interval_ = kMinProbeInterval;
    } else if (team != is_best) {
      probe_interval_ = std::min(2 * probe_interval_, kMaxProbeInterval);
    }
  }

 private:
  static constexpr double kWeight = 0.2, kMostSlower = 1.5;
  static constexpr int kMinProbeInterval = 32, kMaxProbeInterval = 512;
  double seconds_per_work_[2] = {0, 0};  // one thread, team; 0: not measured
  int num_calls_ = 0;
  int probe_interval_ = kMinProbeInterval;
};

}  // namespace faser

#endif  // FASER_TEAM_CHOOSER_H_
