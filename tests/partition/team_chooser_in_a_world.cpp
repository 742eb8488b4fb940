// Runs the team chooser against a machine whose second core comes and goes; prints time over that of the better choice.
#include <cstdio>
#include <cstdlib>

#include "team_chooser.h"

namespace {

// Of a pass: alone, by a team on free cores, by a team while a neighbour holds a core, and for the first team pass
// after a pass of one thread (the others are woken).
constexpr double kOne = 1.0, kTeam = 0.5, kHeld = 5.0, kWoken = 1.2;

}  // namespace

// arguments: passes, length of a period in passes, share of each period in which a neighbour holds a core, and the
// share of single passes that are slow by chance
int main(int, char** arguments) {
  const int num_passes = std::atoi(arguments[1]), period = std::atoi(arguments[2]);
  const double share_held = std::atof(arguments[3]), share_slow = std::atof(arguments[4]);
  faser::TeamChooser chooser;
  double spent = 0, best = 0;
  unsigned random = 1;
  bool last_was_team = false;
  for (int i = 0; i < num_passes; i++) {
    const bool held = i % period < share_held * period;
    const bool team = chooser.use_team();
    random = random * 1664525u + 1013904223u;
    double seconds = !team ? kOne : held ? kHeld : last_was_team ? kTeam : kWoken;
    if (random / 4294967296.0 < share_slow) seconds *= 10;
    last_was_team = team;
    chooser.record(team, seconds);
    spent += team ? (held ? kHeld : kTeam) : kOne;  // chance slows all choices alike
    best += held ? kOne : kTeam;
  }
  std::printf("%.4f\n", spent / best);
}
