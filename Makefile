# `make run` shows what nametap does. `make test` runs the tests that pass on any machine, `make system` those that
# need root, namespaces and a kernel. As root on Debian, the targets install what else they need than Go, make and git.
# `make help` lists all targets. release.mk has those of installation and releases.

GO       ?= go
TOOL     := $(GO) tool -modfile=$(CURDIR)/tools/go.mod
FUZZTIME ?= 60s
# The largest size of the agent's binary, in bytes.
MAXSIZE  ?= 17700000
# Without tracing pages, which nametap never serves, grpc links no html/template. Templates
# call methods by name, so the linker would keep every method: 5 MB of the agent. HTTP servers here speak HTTP/1
# only, and grpc brings its own HTTP/2: that of net/http is 0.5 MB.
TAGS     := grpcnotrace,nethttpomithttp2
BUILD    = CGO_ENABLED=0 $(GO) build -trimpath -tags $(TAGS) -ldflags '$(LINK)' -o bin/
# Other users run the programs that tests build.
SYSTEM   := umask 022 && $(GO) test
MACHINES := cd test/machines && $(SYSTEM) -count=1 -timeout 60m -v

# A go.work above the clone does not have this module.
export GOWORK := off

# Without HOME, Go finds no place for its caches.
ifndef HOME
export HOME := $(shell getent passwd "$$(id -u)" | cut -d: -f6)
endif

# These compile the same packages, so they compile them in the same way, which the build cache then has once.
lint test system: export GOFLAGS = $(shell HOME='$(HOME)' $(GO) env GOFLAGS) -trimpath -tags=$(TAGS)
lint test system: export CGO_ENABLED = 0

##@ develop
.PHONY: help run test system lint build generate fuzz
help: ## list the targets
	@tools/help $(MAKEFILE_LIST)

run: ## start the demo: a control plane, an agent and a tour (ARGS=--once ends after the tour)
	@GO='$(GO)' TAGS='$(TAGS)' tools/run $(ARGS)

# `make lint` vets the tests. Without debugging information they link faster. No test waits long; a very slow machine may.
TEST := -vet=off -ldflags='-s -w' -timeout 60m
test: ## run the tests that need nothing but Go; they pass on any machine
	@[ "$$(ulimit -Hn)" = unlimited ] || [ "$$(ulimit -Hn)" -ge 1024 ] || \
		{ echo "the tests need 1024 open files, and the hard limit is $$(ulimit -Hn): raise it (ulimit -n)" >&2; exit 1; }
	$(GO) test $(TEST) $$($(GO) list ./... | grep -v '^github.com/nametap/nametap/test')

system: ## test the real binaries in network namespaces: capture, kills, floods (needs root; ARGS=-run=Name selects tests)
	@tools/need-root
	@tools/install-missing ip iptables-nft nft conntrack dig dnsmasq dbus-daemon systemd-analyze promtool ssh-keygen unshare gcc musl-gcc
	@TMPDIR=$$(mktemp -d /tmp/nt.XXXXXX) && export TMPDIR && trap 'rm -rf --one-file-system "$$TMPDIR"' EXIT && trap 'exit 130' HUP INT TERM && \
		chmod 755 "$$TMPDIR" && $(SYSTEM) $(TEST) -count=1 -p 1 ./test/... $(ARGS)

lint: ## run the linters, and check the sizes of the agent and of each room, and the generated code
	$(BUILD) ./cmd/nametap
	@tools/check-size bin/nametap $(MAXSIZE)
	$(TOOL) golangci-lint run ./...
	cd test/machines && $(TOOL) golangci-lint run ./...
	@TOOL='$(TOOL)' tools/check-generated
	@tools/check-budget tools/budget

build: ## build static binaries in bin/
	$(BUILD) ./cmd/...

generate: ## write the code in api/, the texts of `nametap explain`, and deploy/kubernetes from the chart
	TOOL='$(TOOL)' tools/generate api
	$(GO) test ./docs -run BehaviourEntries -update
	cd test/machines && $(GO) test ./chart -run Manifests -update

fuzz: ## run every fuzz target for FUZZTIME
	@tools/fuzz-all $(FUZZTIME)

##@ measure
.PHONY: bench microbench race
bench: ## compare the agent with other servers, over the wire (ARGS=-help lists the options)
	@tools/install-missing dnsperf dnsmasq unbound nsd
	cd bench && $(GO) run . $(ARGS)

microbench: ## run the Go benchmarks of the parts
	$(GO) test -run '^$$' -bench . -benchmem ./...

race: ## run all tests with the race detector (needs root and a C compiler)
	@tools/need-root
	@tools/install-missing gcc
	$(SYSTEM) -race -vet=off -count=1 -p 1 -timeout 90m ./...

##@ machines
.PHONY: vm node interop guard chart browser random nightly
vm: ## test the agent on a booted Debian (needs root; ARGS=-run=Name selects tests, here and below)
	@tools/install-missing debootstrap systemd-nspawn ip iptables-nft nft dnsmasq conntrack
	$(MACHINES) ./vm $(ARGS)

node: ## test the agent in pods of a real Kubernetes node (needs root)
	@tools/install-missing containerd runc /usr/lib/cni/bridge debootstrap ip iptables conntrack nsenter
	$(MACHINES) -parallel 8 ./node $(ARGS)

interop: ## test the agent and nametap-discovery with a real istiod and API server (needs root)
	@tools/install-missing ip
	$(MACHINES) ./interop $(ARGS)

guard: ## test a guard with the clients of package managers and languages (needs root)
	@tools/install-missing ip iptables unshare curl git ssh sshd ssh-keygen dpkg-scanpackages python3 pip3 npm node cargo java keytool chromium
	$(MACHINES) ./guard $(ARGS)

chart: ## test the Helm chart with Helm 3 and 4 (`make interop ARGS=-run=TestChart` installs it)
	$(MACHINES) ./chart $(ARGS)

browser: ## test the page of the fleet in a browser without a screen (needs root; ARGS=-browser.pictures=DIR writes pictures)
	@tools/install-missing chromium
	$(MACHINES) ./browser $(ARGS)

random: ## send the agent a million random queries while nameservers fail and settings change (ARGS=-random.seed=1)
	$(BUILD) ./cmd/nametap
	$(GO) test -count=1 -timeout 30m -v ./test/random -run '^TestRandomQueries$$' -random.queries=1000000 -random.agent=$(CURDIR)/bin/nametap -random.seed=$$(date +%s) $(ARGS)

nightly: ## run every long target, and write the results to test/machines/LAST (needs root)
	.ci/nightly

include release.mk
