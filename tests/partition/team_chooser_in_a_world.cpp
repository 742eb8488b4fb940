// Runs the team chooser against a machine whose second core comes and goes; prints time over that of the better choice.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "team_chooser.h"

namespace {

// Of a pass: alone, by a team while a neighbor holds a core, and for the first team pass
// after a pass of one thread (the others are woken).
constexpr double kOne = 1.0, kHeld = 5.0, kWoken = 1.2;
constexpr int kNumCold = 3, kSpell = 23;  // passes: the first, and of a spell in which the machine is slower
constexpr double kCold = 3.0;

}  // namespace

// arguments: passes, length of a period in passes, share of each period in which a neighbor holds a core, and the
// share of single passes that are slow by chance, the time of a team on free cores, and how much slower than usual the
// machine is in every other spell
int main(int, char** arguments) {
  const int num_passes = std::atoi(arguments[1]), period = std::atoi(arguments[2]);
  const double share_held = std::atof(arguments[3]), share_slow = std::atof(arguments[4]);
  const double team_alone = std::atof(arguments[5]), slower = std::atof(arguments[6]);
  faser::TeamChooser chooser;
  double spent = 0, best = 0;
  unsigned random = 1;
  bool last_was_team = false;
  for (int i = 0; i < num_passes; i++) {
    const bool held = i % period < share_held * period;
    const bool team = chooser.use_team();
    random = random * 1664525u + 1013904223u;
    double seconds = !team ? kOne : held ? kHeld : last_was_team ? team_alone : kWoken;
    if (random / 4294967296.0 < share_slow) seconds *= 10;
    if (i < kNumCold) seconds *= kCold;
    if (i / kSpell % 2 == 1) seconds *= slower;
    last_was_team = team;
    chooser.record(team, seconds);
    spent += team ? (held ? kHeld : team_alone) : kOne;  // chance slows all choices alike
    best += std::min(kOne, held ? kHeld : team_alone);
  }
  std::printf("%.4f\n", spent / best);
}
