#include "services/tools/manual/manual.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <string_view>
#include <vector>

namespace kvtier::services {
namespace {

using CLI::detail::join;

/// Returns `text` with each of `marks` behind a backslash.
std::string escaped(std::string_view text, std::string_view marks) {
  std::string result;
  for (const char c : text) {
    if (marks.find(c) != std::string_view::npos) result += '\\';
    result += c;
  }
  return result;
}

/// Returns text as it stands between single quotes of a shell.
std::string in_quotes(const std::string& text) {
  return CLI::detail::find_and_replace(text, "'", "'\\''");
}

std::vector<std::string> names_of(const std::vector<CommandText>& commands) {
  std::vector<std::string> names;
  for (const CommandText& command : commands) names.push_back(command.name);
  return names;
}

/// Gives the commands of a program its options, which they take as well.
CommandText with_inherited(CommandText program) {
  for (CommandText& command : program.commands) {
    const std::vector<OptionText> own = command.options;
    for (const OptionText& option : program.options) {
      const auto same = [&](const OptionText& each) { return each.flags == option.flags; };
      if (std::ranges::none_of(own, same)) command.options.push_back(option);
    }
  }
  return program;
}

/// What bash knows of one command: the arms of its two `case` statements.
struct BashArms {
  std::string values;
  std::string words;

  void add(const CommandText& command, const std::string& name) {
    std::vector<std::string> flags = names_of(command.commands), choices;
    for (const OptionText& option : command.options) {
      flags.insert(flags.end(), option.flags.begin(), option.flags.end());
      if (option.flags.empty())
        choices.insert(choices.end(), option.values.begin(), option.values.end());
      if (option.flags.empty() || option.type.empty()) continue;
      std::vector<std::string> patterns;
      for (const std::string& flag : option.flags) patterns.push_back(name + ":" + flag);
      values += "    " + join(patterns, "|") + ") values=\"" + join(option.values, " ") +
                "\" takes_value=1 ;;\n";
    }
    flags.insert(flags.end(), choices.begin(), choices.end());
    words += "    " + (name.empty() ? "\"\"" : name) + ") words=\"" + join(flags, " ") + "\" ;;\n";
  }
};

/// The options of a command for zsh's _arguments, one quoted specification a line.
std::string zsh_arguments(const CommandText& command, const std::string& indent) {
  std::string text;
  for (const OptionText& option : command.options) {
    const std::string what = escaped(option.description, "\\[]:");
    std::string action;
    if (!option.type.empty()) {
      action = ":" + option.type + ":" +
               (option.values.empty() ? "_files" : "(" + join(option.values, " ") + ")");
    }
    std::vector<std::string> specifications;
    for (const std::string& flag : option.flags) {
      const bool joins = !option.type.empty() && flag.starts_with("--");
      specifications.push_back(flag + (joins ? "=[" : "[") + what + "]" + action);
    }
    if (option.flags.empty()) specifications.push_back("*" + action);
    for (const std::string& specification : specifications) {
      text += " \\\n" + indent + "'" + in_quotes(specification) + "'";
    }
  }
  return text;
}

void add_fish(const CommandText& command, const std::string& program, const std::string& condition,
              std::string& text) {
  for (const OptionText& option : command.options) {
    text += "complete -c " + program + " -n '" + condition + "'";
    for (const std::string& flag : option.flags) {
      text += flag.starts_with("--") ? " -l " + flag.substr(2) : " -s " + flag.substr(1);
    }
    if (!option.values.empty()) {
      text += " -x -a '" + join(option.values, " ") + "'";
    } else if (!option.flags.empty() && !option.type.empty()) {
      text += " -r";
    }
    if (!option.flags.empty()) text += " -d '" + escaped(option.description, "\\'") + "'";
    text += '\n';
  }
}

}  // namespace

std::string bash_completion(const CommandText& of) {
  const CommandText program = with_inherited(of);
  BashArms arms;
  arms.add(program, "");
  for (const CommandText& command : program.commands) arms.add(command, command.name);
  const std::string commands = join(names_of(program.commands), "|");
  return "# Completion of " + program.name + " for bash; written by `" + program.name +
         " completion bash`.\n"
         "_" +
         program.name +
         "() {\n"
         "  local command=\"\" words=\"\" values=\"\" takes_value=0 i\n"
         "  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}\n"
         "  COMPREPLY=()\n"
         "  # \"--option=value\" is three words to bash.\n"
         "  if [[ $current == \"=\" ]]; then\n"
         "    current=\"\"\n"
         "  elif [[ $previous == \"=\" ]]; then\n"
         "    previous=${COMP_WORDS[COMP_CWORD - 2]}\n"
         "  fi\n"
         "  for ((i = 1; i < COMP_CWORD; ++i)); do\n"
         "    case ${COMP_WORDS[i]} in\n"
         "      " +
         commands +
         ") command=${COMP_WORDS[i]}; break ;;\n"
         "    esac\n"
         "  done\n"
         "  case $command:$previous in\n" +
         arms.values +
         "  esac\n"
         "  if ((takes_value)); then\n"
         "    if [[ -n $values ]]; then mapfile -t COMPREPLY < <(compgen -W \"$values\" -- "
         "\"$current\"); fi\n"
         "    return\n"
         "  fi\n"
         "  case $command in\n" +
         arms.words +
         "  esac\n"
         "  mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$current\")\n"
         "}\n"
         "complete -o default -F _" +
         program.name + " " + program.name + "\n";
}

std::string zsh_completion(const CommandText& of) {
  const CommandText program = with_inherited(of);
  std::string text = "#compdef " + program.name + "\n# Written by `" + program.name +
                     " completion zsh`.\n_" + program.name +
                     "() {\n  local context state state_descr line\n  typeset -A opt_args\n"
                     "  _arguments -C" +
                     zsh_arguments(program, "    ") + " \\\n    '1:command:((";
  for (const CommandText& command : program.commands) {
    text += command.name + "\\:\"" + escaped(in_quotes(command.description), "\\\":()") + "\" ";
  }
  text += "))' \\\n    '*::argument:->argument'\n  case $line[1] in\n";
  for (const CommandText& command : program.commands) {
    text += "    " + command.name + ") _arguments" + zsh_arguments(command, "      ") + " ;;\n";
  }
  return text + "  esac\n}\n_" + program.name + " \"$@\"\n";
}

std::string fish_completion(const CommandText& of) {
  const CommandText program = with_inherited(of);
  const std::string commands = join(names_of(program.commands), " ");
  const std::string none = "not __fish_seen_subcommand_from " + commands;
  std::string text = "# Completion of " + program.name + " for fish; written by `" + program.name +
                     " completion fish`.\n";
  for (const CommandText& command : program.commands) {
    text += "complete -c " + program.name + " -f -n '" + none + "' -a " + command.name + " -d '" +
            escaped(command.description, "\\'") + "'\n";
  }
  add_fish(program, program.name, none, text);
  for (const CommandText& command : program.commands) {
    add_fish(command, program.name, "__fish_seen_subcommand_from " + command.name, text);
  }
  return text;
}

}  // namespace kvtier::services
