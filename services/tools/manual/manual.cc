#include "services/tools/manual/manual.h"

#include "services/console/options.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <string_view>
#include <vector>

namespace kvtier::services {
namespace {

std::string one_line(std::string text) {
  std::ranges::replace(text, '\n', ' ');
  return text;
}

/// Parts "TEXT:{a,b}" and "INT:1 to 9", as CLI11 writes a type with what its validators take.
void read_type(const std::string& type, OptionText& option) {
  const std::size_t open = type.find('{');
  option.type = type.substr(0, type.find_first_of(":{ "));
  if (option.type.empty()) option.type = "TEXT";
  for (const std::string& part : CLI::detail::split(type, ':')) {
    if (part.find(" to ") != std::string::npos) option.range = part;
  }
  if (open == std::string::npos) return;
  option.values = CLI::detail::split(type.substr(open + 1, type.find('}', open) - open - 1), ',');
}

OptionText option_text(const CLI::Option& from) {
  OptionText option;
  for (const std::string& name : from.get_snames()) option.flags.push_back("-" + name);
  for (const std::string& name : from.get_lnames()) option.flags.push_back("--" + name);
  if (option.flags.empty()) option.name = from.get_name(true);
  option.description = one_line(from.get_description());
  option.environment = from.get_envname();
  option.default_value = from.get_default_str();
  option.required = from.get_required();
  if (from.get_items_expected_max() > 0) read_type(from.get_type_name(), option);
  return option;
}

}  // namespace

CommandText command_text(const CLI::App& app) {
  CommandText command{.name = app.get_name(),
                      .description = one_line(app.get_description()),
                      .options = {},
                      .commands = {}};
  for (const CLI::Option* option : app.get_options([](const CLI::Option*) { return true; })) {
    command.options.push_back(option_text(*option));
  }
  for (const CLI::App* child : app.get_subcommands([](const CLI::App*) { return true; })) {
    command.commands.push_back(command_text(*child));
  }
  return command;
}

void add_manual(CLI::App& program, ManualCommand& command) {
  program.add_subcommand("completion", "Print a script that completes this program's command line")
      ->add_option("SHELL", command.shell, "Shell that runs the script")
      ->required()
      ->check(one_of({"bash", "zsh", "fish"}));
  CLI::App* const man = program.add_subcommand(
      "man", "Print the manual page of this program or of one of its commands");
  std::vector<std::string> commands;
  for (const CLI::App* each : program.get_subcommands([](const CLI::App*) { return true; })) {
    commands.push_back(each->get_name());
  }
  man->add_option("COMMAND", command.command, "Command (default: the program)")
      ->check(one_of(commands));
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
