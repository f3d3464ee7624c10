# make            build/spillway (release)
# make test       what the README promises: builds, runs every test, ends in "N passed, N failed"
# make quickstart deps, build, fine-tune the bundled model
# make help       all targets
#
# Another configuration lives in its own folder: make CONFIG=asan, tsan, debug, poison or coverage.
CONFIG ?= release
.DEFAULT_GOAL := all
O      := build/$(CONFIG)
V      ?= 0
Q      := $(if $(filter 1,$(V)),,@)

ifeq ($(CONFIG),tsan)
# gcc's OpenMP runtime is invisible to TSan; clang's brings Archer, which tells TSan about its
# barriers.
CC  := clang
CXX := clang++
endif

warn   := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Werror
opt    := -O2 -g
san    :=
ifeq ($(CONFIG),asan)
opt    := -O1 -g -fno-omit-frame-pointer -DSW_POISON -DSW_CHECK_TURNS
san    := -fsanitize=address,undefined -fno-sanitize-recover=undefined
else ifeq ($(CONFIG),tsan)
opt    := -O1 -g -fno-omit-frame-pointer -DSW_CHECK_TURNS
san    := -fsanitize=thread
else ifeq ($(CONFIG),debug)
opt    := -O0 -g3 -DSW_POISON -DSW_CHECK_TURNS
else ifeq ($(CONFIG),poison)
opt    := -O2 -g -DSW_POISON -DSW_CHECK_TURNS
else ifeq ($(CONFIG),coverage)
# Of the CUDA back end on its stand-in; what is not optimised has a count for each line.
counted := -O0 --coverage
else ifneq ($(CONFIG),release)
$(error unknown CONFIG '$(CONFIG)': release, debug, poison, asan, tsan or coverage)
endif

version := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
common  := $(opt) $(san) -fopenmp -ffp-contract=off -fno-math-errno -D_GNU_SOURCE -I. -MMD -MP
cflags   = -std=gnu11 $(warn) $(common) $(CFLAGS)
cxxflags = -std=gnu++17 -Wall -Wextra -Werror $(common) $(CXXFLAGS)

hash := \#
# Probes compile and link a program; a required part that is missing stops the build with its
# remedy.
probe   = $(shell printf '$(hash)include <%s>\nint main(void){return 0;}\n' '$(1)' | \
            $(CC) -xc - -fopenmp $(2) -o /dev/null 2>/dev/null && echo yes || echo no)
probexx = $(shell printf '$(hash)include <%s>\nint main(){return 0;}\n' '$(1)' | \
            $(CXX) -std=gnu++17 -DTOML_HEADER_ONLY=0 -xc++ - $(2) -o /dev/null 2>/dev/null \
            && echo yes || echo no)
NOBUILD := deps probes help clean quickstart test check-broken check-waits coverage-cuda \
           check-long bench format format-check tidy gpu-bundle gpu-check
# PROBE=0 leaves them out where the same make has just passed them.
PROBE ?= 1
builds := $(or $(filter-out $(NOBUILD),$(MAKECMDGOALS)),$(if $(MAKECMDGOALS),,all))
ifneq ($(and $(filter-out 0,$(PROBE)),$(builds)),)
required = $(if $(filter yes,$(2)),,$(error $(1) is missing: \
             run 'make deps', or install its development package))
$(call required,the compiler $(CC),$(if $(shell command -v $(CC)),yes))
$(call required,liburing,$(call probe,liburing.h,-luring))
$(call required,hwloc,$(call probe,hwloc.h,-lhwloc))
$(call required,OpenMP,$(call probe,omp.h,))
$(call required,oneDNN,$(call probe,dnnl.h,-ldnnl))
$(call required,jansson,$(call probe,jansson.h,-ljansson))
$(call required,xxHash,$(call probe,xxhash.h,-lxxhash))
$(call required,ISA-L,$(call probe,isa-l/crc.h,-lisal))
$(call required,toml++,$(call probexx,toml++/toml.h,))
endif

# Runs of several processes need a plugin, and only the plugin needs Open MPI, whose own compiler
# command tells where it is. WITH_MPI=no leaves it out.
MPICC    ?= $(or $(shell command -v mpicc.openmpi),$(shell command -v mpicc))
mpi_flags := $(if $(MPICC),$(patsubst -I%,-isystem%,$(shell $(MPICC) --showme:compile 2>/dev/null)))
mpi_libs  := $(if $(MPICC),$(shell $(MPICC) --showme:link 2>/dev/null))
mpi_probe  = $(if $(mpi_libs),$(call probe,mpi.h,$(mpi_flags) $(mpi_libs)),no)
ifneq ($(builds),)
ifeq ($(origin WITH_MPI),undefined)
WITH_MPI := $(mpi_probe)
ifeq ($(WITH_MPI)$(PROBE),no1)
$(info no Open MPI here, so no libspillway_mpi.so: runs of several processes need it ('make deps'))
endif
endif
endif

# The CUDA device is a plugin too, and the CPU stand-in that its tests run is built from the same
# sources. Both need the toolkit's headers, the former nvcc as well. WITH_CUDA=no leaves both out.
CUDA_HOME  ?= $(or $(patsubst %/bin/nvcc,%,$(wildcard /usr/local/cuda/bin/nvcc)), \
                $(patsubst %/bin/nvcc,%,$(shell command -v nvcc)),/usr/local/cuda)
NVCC       ?= $(wildcard $(CUDA_HOME)/bin/nvcc)
# Targets by number; `all`: what of cuda_known this nvcc has.
CUDA_ARCHS ?= all
cuda_known := 80 89 90 100 103 120
cuda_has    = $(patsubst sm_%,%,$(filter sm_%,$(shell $(NVCC) --list-gpu-code 2>/dev/null)))
cuda_archs  = $(if $(filter all,$(CUDA_ARCHS)),$(filter $(cuda_has),$(cuda_known)),$(CUDA_ARCHS))
cuda_at    = -I$(CUDA_HOME)/include -L$(CUDA_HOME)/lib64
ifneq ($(builds),)
ifeq ($(origin WITH_CUDA),undefined)
WITH_CUDA := $(call probe,cublasLt.h,$(cuda_at))
endif
ifeq ($(WITH_CUDA)$(PROBE),no1)
$(info no CUDA toolkit here, so no libspillway_cuda.so: GPUs need it, and so do tests of its code)
endif
endif

# What this machine has, a line each. NCCL is optional: several GPUs need it.
said      = @printf '  %-8s %-8s %s\n' $(1) $(2) $(3)
probes:
	$(call said,liburing,required,$(call probe,liburing.h,-luring))
	$(call said,hwloc,required,$(call probe,hwloc.h,-lhwloc))
	$(call said,OpenMP,required,$(call probe,omp.h,))
	$(call said,oneDNN,required,$(call probe,dnnl.h,-ldnnl))
	$(call said,jansson,required,$(call probe,jansson.h,-ljansson))
	$(call said,xxHash,required,$(call probe,xxhash.h,-lxxhash))
	$(call said,ISA-L,required,$(call probe,isa-l/crc.h,-lisal))
	$(call said,toml++,required,$(call probexx,toml++/toml.h,))
	$(call said,cmocka,tests,$(call probe,stdarg.h>\n$(hash)include <stddef.h>\n$(hash)include \
	  <setjmp.h>\n$(hash)include <stdint.h>\n$(hash)include <cmocka.h,-lcmocka))
	$(call said,'Open MPI',optional,$(mpi_probe))
	$(call said,CUDA,optional,$(call probe,cuda_runtime_api.h,$(cuda_at) -lcudart))
	$(call said,NCCL,optional,$(call probe,nccl.h,$(cuda_at) -lnccl))
.PHONY: probes

libs := -luring -lhwloc -ldnnl -ljansson -lxxhash -lisal -lm -lpthread -ldl

# kernels/host/*_isa.c, offload/*_isa.c and cpu_adam/adam_<isa>.c are the only sources with their
# own instruction sets.
isa_scalar :=
isa_avx2   := -mavx2 -mfma -mf16c
isa_avx512 := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c
isas       := scalar avx2 avx512

isa_srcs := $(wildcard kernels/host/*_isa.c offload/*_isa.c)
# The plugin's source, which the library does without.
mpi_srcs := engine/collective_mpi.c
lib_srcs := $(filter-out $(isa_srcs) $(mpi_srcs),$(wildcard base/*.c cpu_adam/*.c nvme/*.c \
              kernels/*.c kernels/host/*.c offload/*.c engine/*.c plan/*.c))
lib_objs := $(lib_srcs:%=$(O)/%.o) $(foreach i,$(isas),$(isa_srcs:%.c=$(O)/%.$(i).o))
# Sanitizers have their own malloc.
tool_objs := $(patsubst %,$(O)/%.o,$(filter-out $(if $(san),tools/alloc_hooks.c), \
               $(wildcard tools/*.c tools/*.cpp)))
tests    := $(patsubst %.c,$(O)/%,$(wildcard tests/test_*.c))
preloads := $(patsubst %.c,$(O)/%.so,$(wildcard tests/preload/*.c))
# adam_peer.c and adam_builds.c are built by the scripts of their names.
bench_tools := $(patsubst %.c,$(O)/%,$(filter-out %/adam_peer.c %/adam_builds.c, \
                 $(wildcard tests/bench/*.c)))
# support_world.c is a program that tests/world.py runs.
test_support := $(patsubst %,$(O)/%.o,$(filter-out %_world.c,$(wildcard tests/support_*.c)))
program  := $(if $(filter release,$(CONFIG)),build/spillway,$(O)/spillway)
plugins  := $(if $(filter yes,$(WITH_MPI)),$(dir $(program))libspillway_mpi.so)
# The GPU's own plugin is the release program's.
plugins  += $(if $(and $(filter yes,$(WITH_CUDA)),$(NVCC),$(filter release,$(CONFIG))), \
              build/libspillway_cuda.so)
standin  := $(if $(filter yes,$(WITH_CUDA)),$(dir $(program))standin/libspillway_cuda.so)

all: $(program) $(plugins)
	@:
# Tests of the GPU's code run on the stand-in.
tests: $(program) $(filter-out %_cuda.so,$(plugins)) $(standin) $(tests) $(preloads) \
       $(O)/tests/support_world
standin: $(standin)

$(program): $(tool_objs) $(O)/libspillway.a
	@echo "  LINK  $@"
	$(Q)$(CXX) $(common) $^ $(libs) -o $@

$(O)/libspillway.a: $(lib_objs)
	@rm -f $@
	$(Q)$(AR) rcs $@ $^

$(O)/tests/test_%: $(O)/tests/test_%.c.o $(test_support) $(O)/libspillway.a
	@echo "  LINK  $@"
	$(Q)$(CC) $(common) $(filter %.o,$^) $(filter %.a,$^) -lcmocka $(libs) -o $@

$(mpi_srcs:%=$(O)/%.o): cflags += -fPIC $(mpi_flags)
$(dir $(program))libspillway_mpi.so: $(mpi_srcs:%=$(O)/%.o)
	@echo "  LINK  $@"
	$(Q)$(CC) $(common) -shared $< $(mpi_libs) -o $@
$(O)/tests/support_world: $(O)/tests/support_world.c.o $(O)/libspillway.a \
  | $(filter-out %_cuda.so,$(plugins))
	@echo "  LINK  $@"
	$(Q)$(CC) $(common) $(filter %.o,$^) $(filter %.a,$^) $(libs) -o $@

# Kernels by nvcc; the C files once for the GPU and the stand-in. adam.cu has the CPU's bits: no
# contraction, and subnormals count as zero.
cuda_kernels := $(wildcard kernels/cuda/*.cu)
# NCCL may be missing where CUDA is not.
WITH_NCCL    := $(wildcard $(CUDA_HOME)/include/nccl.h /usr/include/nccl.h)
cuda_c       := $(filter-out $(if $(WITH_NCCL),,%_nccl.c),$(wildcard kernels/cuda/*.c))
$(cuda_c:%=$(O)/%.o): cflags += -fPIC -isystem $(CUDA_HOME)/include \
                                $(if $(WITH_NCCL),-DSW_WITH_NCCL) $(counted)
nvcc_flags := -std=c++17 -O3 -lineinfo -Werror all-warnings -Xcompiler -Wall,-Wextra,-fPIC -I. \
              -Xptxas -v \
              $(foreach a,$(cuda_archs),-gencode arch=compute_$(a),code=sm_$(a)) \
              $(foreach a,$(lastword $(cuda_archs)),-gencode arch=compute_$(a),code=compute_$(a))
# Kernels that were built for other targets are built anew.
cuda_targets := $(O)/kernels/cuda/targets
.PHONY: FORCE
$(cuda_targets): FORCE
	@mkdir -p $(@D)
	@echo '$(cuda_archs)' | cmp -s - $@ || echo '$(cuda_archs)' > $@
$(O)/kernels/cuda/adam.cu.o: nvcc_flags += -fmad=false -ftz=true -DGPU_SUBNORMALS_ARE_ZERO
$(O)/standin/kernels/cuda/adam.cu.o: cxxflags += -DGPU_SUBNORMALS_ARE_ZERO
$(cuda_kernels:%=$(O)/standin/%.o): cxxflags += $(counted)
# 1675: a pragma of gcc's, in a header that only the CPU runs. What ptxas says of registers stays
# beside the object, for tests/kernel_report.py.
$(O)/%.cu.o: %.cu Makefile $(cuda_targets)
	@mkdir -p $(@D)
	@echo "  NVCC  $<"
	$(Q)$(NVCC) $(nvcc_flags) -diag-suppress=1675 -MMD -MP -MF $(@:.o=.d) -c $< -o $@ \
	  2> $(@:.cu.o=.ptxas) || { cat $(@:.cu.o=.ptxas) >&2; rm -f $@; exit 1; }
build/libspillway_cuda.so: $(cuda_kernels:%=$(O)/%.o) $(cuda_c:%=$(O)/%.o) kernels/cuda/plugin.map
	@echo "  LINK  $@"
	$(Q)$(CC) -shared -Wl,-z,defs -Wl,--version-script=kernels/cuda/plugin.map \
	  $(filter %.o,$^) -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 \
	  -lcudart_static -lcublasLt $(if $(WITH_NCCL),-lnccl) -lstdc++ -lm -ldl -lrt -lpthread -o $@

# The same kernels by the host's compiler. The stand-in itself is invisible to TSan, which it tells
# what a kernel does. It sees the back end's calloc, so that memory can fail too.
standin_srcs  := $(filter-out $(if $(WITH_NCCL),,%_nccl.cpp %_board.cpp), \
                   $(wildcard tests/standin/*.cpp))
standin_cpu   := $(standin_srcs:%=$(O)/standin/%.o)
standin_objs  := $(cuda_kernels:%=$(O)/standin/%.o) $(standin_cpu)
standin_wrap  := -Wl,--wrap=calloc
standin_flags := -fPIC -ftls-model=initial-exec -Itests/standin -isystem $(CUDA_HOME)/include
$(O)/standin/%.cu.o: %.cu Makefile
	@mkdir -p $(@D)
	@echo "  CXX   $< (stand-in)"
	$(Q)$(CXX) $(cxxflags) $(standin_flags) -Wno-unknown-pragmas -x c++ -c $< -o $@
$(O)/standin/tests/standin/%.cpp.o: tests/standin/%.cpp Makefile
	@mkdir -p $(@D)
	@echo "  CXX   $<"
	$(Q)$(CXX) $(cxxflags) $(standin_flags) \
	  $(if $(filter tsan,$(CONFIG)),-fno-sanitize=thread -DSTANDIN_TSAN) -c $< -o $@
$(dir $(program))standin/libspillway_cuda.so: $(standin_objs) $(cuda_c:%=$(O)/%.o) \
  kernels/cuda/plugin.map
	@mkdir -p $(@D)
	@echo "  LINK  $@"
	$(Q)$(CXX) $(common) $(counted) -shared -Wl,-Bsymbolic $(standin_wrap) \
	  -Wl,--version-script=kernels/cuda/plugin.map $(filter %.o,$^) -lpthread -o $@
$(filter $(O)/tests/test_cuda%,$(tests)): | $(standin) $(O)/tests/preload/cufile.so

# The stand-in's own test calls it as a program calls CUDA.
ifeq ($(WITH_CUDA),yes)
standin_test := $(standin_cpu) $(O)/standin/tests/standin/standin_probes.cu.o
$(O)/tests/test_standin: $(standin_test)
$(O)/tests/test_standin: libs += -lstdc++ $(standin_wrap)
$(O)/tests/test_standin.c.o: cflags += -isystem $(CUDA_HOME)/include \
                                       $(if $(WITH_NCCL),-DSW_WITH_STANDIN)
endif

# What `make gpu-check` takes to a machine with GPUs (tests/gpu/bundle.py packs it): programs that
# find the libraries packed with them, for which only a run path of the old kind serves the
# libraries' own libraries too. Release alone.
gpu_link  := -Wl,--disable-new-dtags,-rpath,'$$ORIGIN/../lib:$$ORIGIN/../../lib'
# Calls fail on the stand-in alone.
gpu_tests := $(patsubst tests/%.c,$(O)/gpu/tests/%, \
               $(filter-out %_errors.c %_start.c,$(wildcard tests/test_cuda_*.c)))
gpu_parts := $(O)/gpu/spillway $(O)/gpu/gpu_rates $(gpu_tests) \
             $(if $(WITH_NCCL),$(O)/gpu/libnccl.so.2)
$(O)/gpu/spillway: $(tool_objs) $(O)/libspillway.a
	@mkdir -p $(@D)
	@echo "  LINK  $@"
	$(Q)$(CXX) $(common) $^ $(libs) $(gpu_link) -o $@
$(O)/gpu/tests/test_%: $(O)/tests/test_%.c.o $(test_support) $(O)/libspillway.a
	@mkdir -p $(@D)
	@echo "  LINK  $@"
	$(Q)$(CC) $(common) $^ -lcmocka $(libs) $(gpu_link) -o $@
$(O)/gpu/gpu_rates: $(O)/tests/gpu/gpu_rates.c.o $(O)/libspillway.a
	@mkdir -p $(@D)
	@echo "  LINK  $@"
	$(Q)$(CC) $(common) $^ $(libs) $(gpu_link) -o $@
# CUDA's own rates, on a GPU and on the stand-in.
$(O)/tests/gpu/bare_rates.c.o: cflags += -isystem $(CUDA_HOME)/include
$(O)/gpu/bare_rates: $(O)/tests/gpu/bare_rates.c.o
	@mkdir -p $(@D)
	@echo "  LINK  $@"
	$(Q)$(CC) $(common) $< -L$(CUDA_HOME)/lib64 -lcudart_static -lcublasLt -lstdc++ -lm -ldl -lrt \
	  -lpthread $(gpu_link) -o $@
$(O)/gpu/standin/bare_rates: $(O)/tests/gpu/bare_rates.c.o $(standin_cpu)
	@mkdir -p $(@D)
	@echo "  LINK  $@"
	$(Q)$(CC) $(common) $^ $(standin_wrap) -lstdc++ -lm -lpthread $(gpu_link) -o $@
$(O)/gpu/libnccl.so.2: tests/gpu/nccl_absent.c Makefile
	@mkdir -p $(@D)
	@echo "  LINK  $@"
	$(Q)$(CC) -std=gnu11 $(warn) -isystem $(CUDA_HOME)/include -shared -fPIC -Wl,-soname,$(@F) $< -o $@
gpu-standin: $(gpu_parts) $(O)/gpu/standin/bare_rates $(standin)
gpu-parts: $(gpu_parts) $(O)/gpu/bare_rates build/libspillway_cuda.so
ifeq ($(CONFIG)$(WITH_CUDA),releaseyes)
tests: gpu-standin
endif

# Loaded into whole runs by LD_PRELOAD; without sanitizers, which are the program's.
$(O)/tests/preload/%.so: tests/preload/%.c tests/support_file_name.h Makefile
	@mkdir -p $(@D)
	@echo "  CC    $<"
	$(Q)$(CC) -std=gnu11 $(warn) -Wno-missing-prototypes -O1 -D_GNU_SOURCE -I. -shared -fPIC $< \
	  -ldl -o $@

$(O)/tests/bench/%: $(O)/tests/bench/%.c.o $(O)/libspillway.a
	@echo "  LINK  $@"
	$(Q)$(CC) $(common) $(filter %.o,$^) $(filter %.a,$^) $(libs) -o $@
# The whole program, with some of its tasks ending at once.
$(O)/tests/bench/null_lanes: $(O)/tests/bench/null_lanes.c.o $(tool_objs) $(O)/libspillway.a
	@echo "  LINK  $@"
	$(Q)$(CXX) $(common) $^ -Wl,--wrap=sw_executor_open,--wrap=sw_adam_update \
	  $(libs) -o $@
# Turns of a plan, on lanes that do nothing.
$(O)/tests/bench/turn_cost: $(O)/tests/support_plan.c.o $(O)/tests/support_null_lanes.c.o
bench-tools: $(bench_tools)

# The CPU Adam is usable on its own: this one links with nothing but base/.
adam_alone := $(patsubst %,$(O)/%.o,$(wildcard base/*.c cpu_adam/*.c))
$(O)/tests/test_adam_alone: $(O)/tests/test_adam_alone.c.o $(adam_alone)
	@echo "  LINK  $@"
	$(Q)$(CC) $(common) $^ -lcmocka -lisal -lm -lpthread -o $@

# The options are tools/, which is not in the library, and their TOML parser is C++.
$(O)/tests/test_options: $(filter $(O)/tools/command_line%.o $(O)/tools/toml_%.o,$(tool_objs))
$(O)/tests/test_options: libs += -lstdc++
# And so are the lines that a plan offers.
$(O)/tests/test_plan_decide: $(filter $(O)/tools/command_line%.o $(O)/tools/toml_%.o \
                               $(O)/tools/plan_%.o,$(tool_objs))
$(O)/tests/test_plan_decide: libs += -lstdc++

# The page of `spillway report` is put into the program; tests of its arithmetic are of tools/ too.
$(O)/tools/report_template.c.o: tools/report.html tools/report.css tools/report.js
$(O)/tests/test_report: $(filter $(O)/tools/report_%.o,$(tool_objs))
# And what bench all asks of devices.
$(O)/tests/test_bench_device $(O)/tests/test_bench_gpu: $(filter $(O)/tools/bench_%.o,$(tool_objs))
# The profiles of machines are put into the program, too.
$(O)/plan/machine_shipped.c.o: $(wildcard plan/machines/*.json)
# What the program's own malloc does to whoever calls it, a matrix product above all.
$(O)/tests/test_alloc_guard: $(filter $(O)/tools/alloc_hooks.c.o,$(tool_objs))

$(O)/cpu_adam/adam_avx2.c.o:   isa = $(isa_avx2)
$(O)/cpu_adam/adam_avx512.c.o: isa = $(isa_avx512)
# Element-wise loops over one span: the compiler may vectorise them; no reduction is reordered by
# -O3.
$(O)/cpu_adam/adam_%.c.o: speed = -O3
$(O)/kernels/host/%.o:    speed = -O3
$(O)/offload/stream_isa.%.o: speed = -O3
ifneq ($(filter asan tsan debug,$(CONFIG)),)
$(O)/cpu_adam/adam_%.c.o $(O)/kernels/host/%.o $(O)/offload/stream_isa.%.o: \
  speed = $(filter -O%,$(opt))
endif

$(O)/%.c.o: %.c Makefile
	@mkdir -p $(@D)
	@echo "  CC    $<"
	$(Q)$(CC) $(cflags) $(speed) $(isa) -DSW_VERSION='"$(version)"' -c $< -o $@

$(O)/%.cpp.o: %.cpp Makefile
	@mkdir -p $(@D)
	@echo "  CXX   $<"
	$(Q)$(CXX) $(cxxflags) -c $< -o $@

# Selects become blends only where a comparison may not trap; no value depends on it.
define isa_rule
$(O)/%_isa.$(1).o: %_isa.c Makefile
	@mkdir -p $$(@D)
	@echo "  CC    $$< ($(1))"
	$(Q)$(CC) $$(cflags) $$(speed) $(isa_$(1)) -fno-trapping-math -DSW_ISA=$(1) -c $$< -o $$@
endef
$(foreach i,$(isas),$(eval $(call isa_rule,$(i))))

# Targets that run something build through one more make, so that `make test` alone uses all cores.
JOBS   ?= $(shell nproc 2>/dev/null || echo 1)
build   = +$(Q)$(MAKE) --no-print-directory CONFIG=$(CONFIG) -j$(JOBS)

help:
	@echo 'make                the program: build/spillway'
	@echo 'make deps           installs what is missing (apt; sudo when not root) and says what'
	@echo 'make standin        the CUDA plugin over a CPU stand-in for CUDA, for tests'
	@echo 'make probes         which libraries are here, and which optional ones (Open MPI...)'
	@echo 'make quickstart     deps, build, then fine-tunes the bundled model for two minutes at most'
	@echo 'make test           builds and runs every test; STRICT=1 makes a skip a failure;'
	@echo '                    TESTS="test_adam same_bits" runs only those'
	@echo 'make test CONFIG=asan, CONFIG=tsan    the same under the sanitizers'
	@echo 'make check-broken   plants each bug of tests/broken/ and demands that its test catches it'
	@echo 'make check-waits    drops each wait of the CUDA back end in turn: a test has to show it'
	@echo 'make coverage-cuda  the lines of kernels/cuda/ that no test executes'
	@echo 'make check-long     the checks that take long or need a network (docs/checks.md)'
	@echo 'make gpu-check      proves the CUDA back end on the GPUs here, in eight minutes at most'
	@echo '                    (docs/gpu-check.md); gpu-bundle packs build/gpu/ for another machine'
	@echo 'make bench          CPU Adam, the drive of build/, memory saved by the NVMe tier, and the'
	@echo '                    overlap modes, on this machine'
	@echo 'make bench-tools    the programs of tests/bench/*.c, into build/release/tests/bench/'
	@echo 'make format         clang-format over the sources; format-check only looks'
	@echo 'make tidy           the rules of the tree: lengths, names, words, every test run'
	@echo 'make clean          removes build/'
	@echo 'CONFIG=release|debug|poison|asan|tsan|coverage chooses the build, V=1 shows the commands.'

deps:
	@scripts/deps.sh $(DEPS)

quickstart: deps
	$(build) all
	@scripts/quickstart.sh

test:
	$(build) tests
	@python3 tests/run.py --config $(CONFIG) $(TESTS)

check-broken:
	$(build) CONFIG=release tests
	@python3 tests/check_broken.py $(VARIANTS)

check-waits:
	$(build) CONFIG=release tests
	@python3 tests/check_waits.py $(SITES)

coverage-cuda:
	$(build) CONFIG=coverage standin \
	  $(patsubst %.c,build/coverage/%,$(wildcard tests/test_cuda_*.c))
	@python3 tests/coverage_cuda.py

check-long:
	@scripts/check-long.sh $(CHECKS)

# Where there is no toolkit to build the bundle anew, one from elsewhere is run.
gpu-bundle:
	@[ -n "$(NVCC)" ] || { echo "gpu-bundle: no nvcc here (CUDA_HOME=$(CUDA_HOME)): install CUDA's \
	toolkit, or bring build/gpu from a machine that has it" >&2; exit 1; }
	$(build) CONFIG=release gpu-parts
	@python3 tests/gpu/bundle.py

gpu-check:
	$(if $(NVCC)$(if $(wildcard build/gpu/gpu-check),,1),+$(Q)$(MAKE) --no-print-directory gpu-bundle)
	@build/gpu/gpu-check $(GPU_CHECK)

bench:
	$(build) CONFIG=release all
	@build/spillway bench adam
	@build/spillway bench nvme --nvme build
	@python3 tests/bench/out_of_core.py
	@python3 tests/bench/overlap.py

format:
	@scripts/format.sh -i

format-check:
	@scripts/format.sh --dry-run -Werror

tidy:
	@python3 tests/tidy.py

clean:
	rm -rf build

.PHONY: all tests standin gpu-standin gpu-parts gpu-bundle gpu-check bench-tools help deps \
        quickstart test check-broken check-waits coverage-cuda check-long bench format \
        format-check tidy clean
.SECONDARY:
-include $(shell find $(O) -name '*.d' 2>/dev/null)
