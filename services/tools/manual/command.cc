#include "services/tools/manual/command.h"

#include "services/tools/manual/completion.h"
#include "services/tools/manual/man_page.h"

#include <CLI/CLI.hpp>

namespace kvtier::services {

void add_manual(CLI::App& program, ManualCommand& command) {
  program.add_subcommand("completion", "Print a script that completes this program's command line")
      ->add_option("SHELL", command.shell, "Shell that runs the script")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  program.add_subcommand("man", "Print the manual page of this program or of one of its commands")
      ->add_option("COMMAND", command.command, "Command (default: the program)");
}

void run_completion(const CLI::App& program, const ManualCommand& command, const Console& console) {
  const CommandText text = command_text(program);
  console.out << (command.shell == "zsh"    ? zsh_completion(text)
                  : command.shell == "fish" ? fish_completion(text)
                                            : bash_completion(text));
}

void run_man(const CLI::App& program, const ManualCommand& command, const std::string& version,
             const Console& console) {
  console.out << man_page(command_text(program), command.command, version);
}

}  // namespace kvtier::services
