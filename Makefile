# `make run` shows what nametap does; `make test` runs every test this machine
# allows. Both need Go, make and git, and install what else is missing.

GO       ?= go
TOOL     := $(GO) tool -modfile=tools/go.mod
FUZZTIME ?= 60s
IMAGE    ?= nametap
COVERAGE ?= 80
# The largest size of the agent's binary, in bytes.
MAXSIZE  ?= 16500000
# Without tracing pages, which nametap never serves, grpc links no html/template. Templates
# call methods by name, so the linker would keep every method: 5 MB of the agent.
TAGS     := grpcnotrace
PREFIX   ?= /usr/local
# systemd looks for units in these two alone.
LIBDIR   ?= $(if $(filter /usr,$(PREFIX)),/usr,/usr/local)/lib

.PHONY: run build test lint fuzz bench microbench generate image install clean

run: build ## the demo: control plane, agent and a tour
	./bin/nametap-demo $(ARGS)

build: ## the binaries, static, in bin/
	CGO_ENABLED=0 $(GO) build -trimpath -tags $(TAGS) -ldflags '-s -w' -o bin/ ./cmd/...

test: ## all tests, with the race detector and the coverage
	@scripts/install-missing gcc ip iptables conntrack dig dnsmasq systemd-analyze
	@scripts/left-out
	@race="$$(scripts/race-flag)"; set -ex; \
	$(GO) test $$race -coverpkg=./... -coverprofile=coverage.out ./...; \
	cd bench && $(GO) test $$race ./...
	@scripts/check-coverage coverage.out $(COVERAGE)

lint: build ## golangci-lint, the size of the agent, and whether generated code is current
	@scripts/check-size bin/nametap $(MAXSIZE)
	$(TOOL) golangci-lint run ./...
	$(TOOL) buf lint
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && $(TOOL) buf generate -o "$$dir" && \
	for file in nds.pb.go ca/ca.pb.go; do \
	diff -u "api/$$file" "$$dir/api/$$file" || { echo "api/$$file is not current: run \`make generate\`" >&2; exit 1; }; done

fuzz: ## every fuzz target for FUZZTIME
	@scripts/fuzz-all $(FUZZTIME)

bench: ## the agent beside its peers, over the wire (ARGS=-help lists the choices)
	@scripts/install-missing dnsperf dnsmasq unbound nsd gcc musl-gcc
	cd bench && $(GO) run . $(ARGS)

microbench: ## Go benchmarks of the parts
	$(GO) test -run '^$$' -bench . -benchmem ./...

generate: ## the code in api/, the tests in docs/behaviour.md, the imports in ARCHITECTURE.md
	$(TOOL) buf generate
	$(GO) test ./docs -run 'Behaviour|Imports' -update

image: ## the container images (needs a Docker engine)
	docker build --target agent     -t $(IMAGE) .
	docker build --target init      -t $(IMAGE)-init .
	docker build --target discovery -t $(IMAGE)-discovery .

# What the binaries are built from, the commit included.
SOURCES = go.mod go.sum $(wildcard .git/logs/HEAD) \
	$(shell find agent api cmd conntrack discovery dnsproxy examples internal iptables nds supervise -type f ! -name '*_test.go' ! -path '*/testdata/*')

# Built anew only if something changed, so that root, who may have no Go, can install
# what a user has just built.
bin/nametap: $(SOURCES)
	$(MAKE) build
	@touch $@

install: bin/nametap ## the agent and its units for a VM, below DESTDIR
	install -D -m 755 bin/nametap '$(DESTDIR)$(PREFIX)/bin/nametap'
	install -D -m 644 deploy/systemd/nametap.socket   '$(DESTDIR)$(LIBDIR)/systemd/system/nametap.socket'
	install -D -m 644 deploy/systemd/nametap.service  '$(DESTDIR)$(LIBDIR)/systemd/system/nametap.service'
	sed -i 's|/usr/local/bin/|$(PREFIX)/bin/|' '$(DESTDIR)$(LIBDIR)/systemd/system/nametap.service'
	install -D -m 644 deploy/systemd/nametap.sysusers '$(DESTDIR)$(LIBDIR)/sysusers.d/nametap.conf'
	install -D -m 644 deploy/systemd/nametap.tmpfiles '$(DESTDIR)$(LIBDIR)/tmpfiles.d/nametap.conf'
	test -e '$(DESTDIR)/etc/default/nametap' || \
	install -D -m 644 deploy/systemd/nametap.default  '$(DESTDIR)/etc/default/nametap'
	@echo 'Now edit /etc/default/nametap, then run: systemd-sysusers nametap.conf && systemd-tmpfiles --create nametap.conf && \'
	@echo '  systemctl daemon-reload && systemctl enable --now nametap.socket nametap.service'

clean:
	rm -rf bin coverage.out
