// Which of the first eight passes of a larger size a team runs, where the smaller size's passes took as long as said.
#include <cstdio>
#include <cstdlib>

#include "team_chooser.h"

// arguments: what a pass of one thread takes, and of a team
int main(int, char** arguments) {
  const double seconds[2] = {std::atof(arguments[1]), std::atof(arguments[2])};
  faser::TeamChooser sizes[4];
  const auto run = [&](int size) {
    faser::TeamChooser& chooser = faser::TeamChooser::of_size(sizes, size);
    const bool team = chooser.use_team();
    chooser.record(team, seconds[team]);
    return team;
  };
  for (int i = 0; i < 8; i++) run(0);
  for (int i = 0; i < 8; i++) std::printf("%d", run(3));
  std::printf("\n");
}
