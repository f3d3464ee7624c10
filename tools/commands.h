/* tools/commands.h - the subcommands. argv[0] is the command's own name; each returns the exit
 * status, or SW_EXIT_AGAIN. */
#ifndef TOOLS_COMMANDS_H
#define TOOLS_COMMANDS_H

int sw_cmd_train(int argc, char **argv);
int sw_cmd_export(int argc, char **argv);
int sw_cmd_inspect(int argc, char **argv);
int sw_cmd_init(int argc, char **argv);
int sw_cmd_doctor(int argc, char **argv);
int sw_cmd_bench(int argc, char **argv);
int sw_cmd_plan(int argc, char **argv);
int sw_cmd_report(int argc, char **argv);

#endif
