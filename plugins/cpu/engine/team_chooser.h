// Chooses how many threads share a pass. Results do not depend on it, so it can follow measurements.
#ifndef FASER_TEAM_CHOOSER_H_
#define FASER_TEAM_CHOOSER_H_

#include <algorithm>
#include <limits>

namespace faser {

// Chooses between one thread and a team for passes of a similar size. A team is faster on idle cores and much slower
// when another process occupies one of them, since each barrier then waits for the scheduler; this changes at run time.
class TeamChooser {
 public:
  // A size that has not run begins with the result of the nearest smaller one if that was the team: more work favors
  // the team even more, so the first passes need no trials.
  template <int kSizes>
  static TeamChooser& of_size(TeamChooser (&choosers)[kSizes], int size) {
    TeamChooser& chooser = choosers[size];
    for (int smaller = size - 1; chooser.num_first_ == 0 && smaller >= 0; smaller--) {
      if (choosers[smaller].num_first_ < kFirstPasses) continue;
      if (choosers[smaller].team_is_best_) chooser.num_first_ = kFirstPasses;
      break;
    }
    return chooser;
  }

  bool use_team() {
    if (num_first_ < kFirstPasses) return num_first_ % 4 < 2;  // in pairs, since a team's threads must be woken first
    if (num_trials_left_ > 0) return !team_is_best_;
    if (++num_calls_ < interval_) return team_is_best_;
    num_calls_ = 0;
    num_trials_left_ = team_is_best_ ? 1 : kTeamTrials;
    fastest_trial_ = kUnknown;
    return !team_is_best_;
  }

  void record(bool team, double seconds_per_work) {
    if (num_first_ < kFirstPasses) {
      record_first(team, seconds_per_work);
    } else if (team != team_is_best_) {
      record_trial(seconds_per_work);
    } else {
      // A single slow call of the usual choice is not enough: when a thread briefly loses its core, a pass takes ten
      // times as long, and the team would be given up for many passes.
      double& mean = seconds_per_work_[team];
      mean = mean == kUnknown ? seconds_per_work
                              : mean + kWeight * (std::min(seconds_per_work, kMostSlower * mean) - mean);
      // The machine may be slower, or just this choice, so the other one has to be measured.
      if (seconds_per_work_[!team] < mean) num_calls_ = interval_;
    }
  }

 private:
  // The first passes of a size find cold caches and sleeping threads; the best of the others counts.
  void record_first(bool team, double seconds_per_work) {
    if (++num_first_ > kColdPasses) seconds_per_work_[team] = std::min(seconds_per_work_[team], seconds_per_work);
    team_is_best_ = seconds_per_work_[1] <= seconds_per_work_[0];
  }

  // A trial replaces a measurement that may be stale. The team gets the best of a few, since its threads were asleep
  // and must be woken first, and a neighbor may have held a core.
  void record_trial(double seconds_per_work) {
    fastest_trial_ = std::min(fastest_trial_, seconds_per_work);
    if (--num_trials_left_ > 0) return;
    seconds_per_work_[!team_is_best_] = fastest_trial_;
    if (fastest_trial_ < seconds_per_work_[team_is_best_]) {
      team_is_best_ = !team_is_best_;
      interval_ = kMinInterval;
    } else {
      interval_ = std::min(2 * interval_, team_is_best_ ? kMaxIntervalOfTeam : kMaxIntervalOfOne);
    }
  }

  static constexpr double kUnknown = std::numeric_limits<double>::infinity();
  static constexpr double kWeight = 0.2, kMostSlower = 1.5;
  static constexpr int kColdPasses = 4, kFirstPasses = 8, kTeamTrials = 2;
  // Calls between trials. Neighbors come and go, and using one thread where a team could run halves the speed.
  static constexpr int kMinInterval = 16, kMaxIntervalOfTeam = 512, kMaxIntervalOfOne = 256;
  double seconds_per_work_[2] = {kUnknown, kUnknown};  // one thread, team
  double fastest_trial_ = kUnknown;
  bool team_is_best_ = true;
  int num_first_ = 0;
  int num_trials_left_ = 0;
  int num_calls_ = 0;
  int interval_ = kMinInterval;
};

}  // namespace faser

#endif  // FASER_TEAM_CHOOSER_H_
