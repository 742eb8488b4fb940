// Chooses how many threads share a pass. Results do not depend on it, so it can follow measurements.
#ifndef FASER_TEAM_CHOOSER_H_
#define FASER_TEAM_CHOOSER_H_

#include <algorithm>

namespace faser {

// Chooses between one thread and a team for passes of a similar size. A team is faster on idle cores and much slower
// when another process occupies one of them, since each barrier then waits for the scheduler; this changes at run time.
class TeamChooser {
 public:
  bool use_team() {
    if (num_trials_left_ > 0) return !team_is_best_;
    const bool known = seconds_per_work_[0] != 0 && seconds_per_work_[1] != 0;
    if (seconds_per_work_[team_is_best_] == 0 || (known && ++num_calls_ < interval_)) return team_is_best_;
    num_calls_ = 0;
    num_trials_left_ = team_is_best_ ? 1 : kTeamTrials;
    fastest_trial_ = 0;
    return !team_is_best_;
  }

  void record(bool team, double seconds_per_work) {
    if (team != team_is_best_) {
      record_trial(seconds_per_work);
      return;
    }
    double& mean = seconds_per_work_[team];
    // A single slow call of the usual choice is not enough: when a thread briefly loses its core, a pass takes ten
    // times as long, and the team would be given up for many passes.
    if (mean == 0)
      mean = seconds_per_work;
    else
      mean += kWeight * (std::min(seconds_per_work, kMostSlower * mean) - mean);
    const double other = seconds_per_work_[!team];
    if (other != 0 && other < mean) {
      team_is_best_ = !team_is_best_;
      interval_ = kMinInterval;
    }
  }

 private:
  // A trial replaces measurements that may be stale. The team gets the best of a few, since its threads were asleep and
  // must be woken first, and a neighbour may have held a core.
  void record_trial(double seconds_per_work) {
    fastest_trial_ = fastest_trial_ == 0 ? seconds_per_work : std::min(fastest_trial_, seconds_per_work);
    if (--num_trials_left_ > 0) return;
    seconds_per_work_[!team_is_best_] = fastest_trial_;
    if (fastest_trial_ < seconds_per_work_[team_is_best_]) {
      team_is_best_ = !team_is_best_;
      interval_ = kMinInterval;
    } else {
      interval_ = std::min(2 * interval_, team_is_best_ ? kMaxIntervalOfTeam : kMaxIntervalOfOne);
    }
  }

  static constexpr double kWeight = 0.2, kMostSlower = 1.5;
  static constexpr int kTeamTrials = 2;
  // Calls between trials. Neighbours come and go, and using one thread where a team could run halves the speed.
  static constexpr int kMinInterval = 32, kMaxIntervalOfTeam = 512, kMaxIntervalOfOne = 256;
  double seconds_per_work_[2] = {0, 0};  // one thread, team; 0: not measured
  double fastest_trial_ = 0;
  bool team_is_best_ = true;
  int num_trials_left_ = 0;
  int num_calls_ = 0;
  int interval_ = kMinInterval;
};

}  // namespace faser

#endif  // FASER_TEAM_CHOOSER_H_
