/* tools/commands.h - the subcommands. argv[0] is the command's own name; the result is the exit
 * status. */
#ifndef TOOLS_COMMANDS_H
#define TOOLS_COMMANDS_H

int sw_cmd_doctor(int argc, char **argv);

#endif
