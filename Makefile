# `make run` shows what nametap does. `make test` runs every test that this machine allows;
# as root on Debian it first installs missing packages. Both need Go, make and git.

GO       ?= go
TOOL     := $(GO) tool -modfile=$(CURDIR)/tools/go.mod
FUZZTIME ?= 60s
# The name and the tag of the images; the manifests in deploy/kubernetes have the same tag.
IMAGE    ?= nametap
VERSION  ?= 0.1.0
COVERAGE ?= 80
# The largest size of the agent's binary, in bytes.
MAXSIZE  ?= 17000000
# Without tracing pages, which nametap never serves, grpc links no html/template. Templates
# call methods by name, so the linker would keep every method: 5 MB of the agent.
TAGS     := grpcnotrace
PREFIX   ?= /usr/local
# The two places where systemd looks for installed units.
LIBDIR   ?= $(if $(filter /usr,$(PREFIX)),/usr,/usr/local)/lib

# Where `make install` takes the agent from.
BIN      ?= bin
# What `make packages` and `make image` build. The time of the commit is the time of all files in
# them, so that equal sources give equal packages and images. An unpacked archive has none.
ARCHES   ?= amd64 arm64
FORMATS  ?= deb rpm apk
SOURCE_DATE_EPOCH ?= $(shell scripts/commit-time)
RELEASE  = GO='$(GO)' TAGS='$(TAGS)' VERSION='$(VERSION)' ARCHES='$(ARCHES)' FORMATS='$(FORMATS)' SOURCE_DATE_EPOCH='$(SOURCE_DATE_EPOCH)'

.PHONY: run build manual test lint fuzz bench microbench vm node interop egress chart soak generate packages image image-update \
	release reproducible release-test sign verify vuln install clean

run: build ## start the demo: a control plane, an agent and a tour
	./bin/nametap-demo $(ARGS)

build: ## build static binaries in bin/
	CGO_ENABLED=0 $(GO) build -trimpath -tags $(TAGS) -ldflags '-s -w' -o bin/ ./cmd/...

manual: ## write the manual pages and the shell completion to bin/share
	@for command in nametap nametap-discovery; do rm -rf bin/share/$$command; \
	CGO_ENABLED=0 GOOS=$$($(GO) env GOHOSTOS) GOARCH=$$($(GO) env GOHOSTARCH) $(GO) run -trimpath -tags $(TAGS),manual ./cmd/$$command bin/share/$$command || exit; done

# BUSY are the packages whose tests need both processors, for agents in namespaces of their own.
BUSY = '/nametap/\(iptables\|test\)$$'

test: ## run all tests with the race detector, and measure the coverage
	@scripts/install-missing gcc ip iptables conntrack dig dnsmasq dbus-daemon systemd-analyze ssh-keygen
	@scripts/left-out
	@race="$$(scripts/race-flag)"; set -ex; \
	$(GO) test $$race -coverpkg=./... -coverprofile=coverage.out $$($(GO) list ./... | grep -v $(BUSY)); \
	$(GO) test $$race -p 1 -coverpkg=./... -coverprofile=coverage.busy.out $$($(GO) list ./... | grep $(BUSY)); \
	tail -n +2 coverage.busy.out >> coverage.out; \
	cd bench && $(GO) test $$race ./...
	@scripts/check-coverage coverage.out $(COVERAGE)

lint: build ## run the linters, and check the size of the agent and the generated code
	@scripts/check-size bin/nametap $(MAXSIZE)
	$(TOOL) golangci-lint run ./...
	cd test/machines && $(GO) vet ./... && $(TOOL) golangci-lint run ./...
	$(TOOL) buf lint
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && $(TOOL) buf generate -o "$$dir" && \
	for file in nds.pb.go ca/ca.pb.go; do \
	diff -u "api/$$file" "$$dir/api/$$file" || { echo "api/$$file is not current: run \`make generate\`" >&2; exit 1; }; done

fuzz: ## run every fuzz target for FUZZTIME
	@scripts/fuzz-all $(FUZZTIME)

bench: ## compare the agent with other servers, over the wire (ARGS=-help lists the options)
	@scripts/install-missing dnsperf dnsmasq unbound nsd gcc musl-gcc
	cd bench && $(GO) run . $(ARGS)

microbench: ## run the Go benchmarks of the parts
	$(GO) test -run '^$$' -bench . -benchmem ./...

vm: ## test the agent on a booted Debian (needs root; ARGS=-run=Name selects tests)
	@scripts/install-missing debootstrap systemd-nspawn ip iptables-nft nft dnsmasq
	cd test/machines && $(GO) test ./vm -count=1 -timeout 60m -v $(ARGS)

node: ## test the agent in pods of a real Kubernetes node (needs root; ARGS=-run=Node/name selects tests)
	@scripts/install-missing containerd runc /usr/lib/cni/bridge debootstrap ip iptables conntrack nsenter
	cd test/machines && $(GO) test ./node -count=1 -parallel 8 -timeout 60m -v $(ARGS)

interop: ## test the agent with a real istiod, beside Istio's agent (needs root; ARGS=-run=Name selects tests)
	@scripts/install-missing ip
	cd test/machines && $(GO) test ./interop -count=1 -timeout 60m -v $(ARGS)

egress: ## test connections to automatic VIPs with real servers (needs root; ARGS=-run=Name selects tests)
	@scripts/install-missing ip iptables-nft unshare mariadbd exim4 nginx tinyproxy curl
	cd test/machines && $(GO) test ./egress -count=1 -timeout 20m -v $(ARGS)

chart: ## test the Helm chart with Helm 3 and 4 (ARGS=-run=Name selects tests; `make interop ARGS=-run=TestChart` installs it)
	cd test/machines && $(GO) test ./chart -count=1 -timeout 60m -v $(ARGS)

soak: ## query the agent for 20 minutes while everything around it fails (needs root; ARGS=-soak.for=3m shortens it)
	@scripts/install-missing ip nft iptables-nft
	cd test/machines && $(GO) test ./soak -count=1 -timeout 60m -v $(ARGS)

generate: ## write the code in api/, the tests in docs/behaviour.md, the imports in CONTRIBUTING.md
	$(TOOL) buf generate
	$(GO) test ./docs -run 'Behaviour|Imports' -update

packages: ## build deb, rpm and apk with VERSION in bin/release (ARCHES, FORMATS)
	@$(RELEASE) scripts/binaries
	@$(RELEASE) scripts/packages

image: ## build the container images with VERSION as their tag in bin/images, without an engine
	@$(RELEASE) scripts/binaries
	@$(RELEASE) IMAGE='$(IMAGE)' scripts/images

image-update: ## write the current versions of the init image's Debian packages
	scripts/debian-packages --update tools/image/debian.list bin/debs amd64 arm64

release: ## build packages, images and their SHA256SUMS in bin/release
	@$(RELEASE) scripts/binaries
	@$(RELEASE) scripts/packages
	@$(RELEASE) IMAGE='$(IMAGE)' scripts/images
	@for image in bin/images/*.tar; do name=$${image##*/}; cp "$$image" "bin/release/$${name%.tar}-$(VERSION)-image.tar" || exit; done
	@scripts/sums bin/release

reproducible: ## build the release twice, in other directories and as other users, and compare
	@$(RELEASE) scripts/reproducible

release-test: ## test bin/release, and the tools that make it (after make release)
	@scripts/install-missing lintian rpm
	cd tools/sbom && NAMETAP_BINARIES="$$(echo ../../bin/linux-*/nametap ../../bin/linux-*/nametap-discovery)" $(GO) test ./... -count=1
	cd tools/image && $(GO) vet ./...
	cd test/machines && $(GO) test ./release -count=1 -timeout 20m -v $(ARGS)

sign: ## sign SHA256SUMS of bin/release with ssh-keygen (KEY=~/.ssh/id_ed25519)
	@scripts/sign '$(KEY)' bin/release

verify: ## check the signature and the files of bin/release (KEY=release.pub)
	@scripts/verify '$(KEY)' bin/release

vuln: ## look for known vulnerabilities that the programs reach (needs https://vuln.go.dev; GOVULNDB names a copy)
	@GO='$(GO)' scripts/vuln

# The sources of the binaries, including the commit.
SOURCES = go.mod go.sum $(wildcard .git/logs/HEAD) \
	$(shell find agent api clock cmd conntrack discovery dnsproxy egress examples guard inject internal iptables nds resolved supervise -type f ! -name '*_test.go' ! -path '*/testdata/*')

# Builds only if a source has changed. So root, who may have no Go, can install what a user
# has built.
bin/nametap: $(SOURCES)
	@$(HAS_GO)
	$(MAKE) build
	@touch $@

PAGE = bin/share/nametap/man/man1/nametap.1
$(PAGE): $(SOURCES)
	@$(HAS_GO)
	$(MAKE) manual
	@touch $@

HAS_GO = command -v $(GO) >/dev/null || { echo 'make: $@ is missing or older than the sources, and the command $(GO) is missing: run `make build manual` as a user with Go first' >&2; exit 1; }

install: $(BIN)/nametap $(PAGE) ## install the agent and its units for a VM, below DESTDIR
	install -D -m 755 '$(BIN)/nametap' '$(DESTDIR)$(PREFIX)/bin/nametap'
	install -D -m 644 deploy/systemd/nametap.socket   '$(DESTDIR)$(LIBDIR)/systemd/system/nametap.socket'
	install -D -m 644 deploy/systemd/nametap.service  '$(DESTDIR)$(LIBDIR)/systemd/system/nametap.service'
	install -D -m 644 deploy/systemd/nametap-guard.service '$(DESTDIR)$(LIBDIR)/systemd/system/nametap-guard.service'
	install -D -m 755 deploy/systemd/back-off '$(DESTDIR)$(PREFIX)/libexec/nametap/back-off'
	install -D -m 644 deploy/systemd/nametap-resolved.socket   '$(DESTDIR)$(LIBDIR)/systemd/system/nametap-resolved.socket'
	install -D -m 644 deploy/systemd/nametap-resolved@.service '$(DESTDIR)$(LIBDIR)/systemd/system/nametap-resolved@.service'
	install -D -m 644 deploy/systemd/nametap-dns.network '$(DESTDIR)$(LIBDIR)/systemd/network/05-nametap-dns.network'
	install -D -m 644 deploy/systemd/nametap.preset '$(DESTDIR)$(LIBDIR)/systemd/system-preset/80-nametap.preset'
	scripts/install-manual bin/share/nametap '$(DESTDIR)$(PREFIX)/share'
	sed -i 's,/usr/local/\(bin\|libexec\)/,$(PREFIX)/\1/,g' '$(DESTDIR)$(LIBDIR)/systemd/system/'nametap*.service
	install -D -m 644 deploy/systemd/nametap.sysusers '$(DESTDIR)$(LIBDIR)/sysusers.d/nametap.conf'
	install -D -m 644 deploy/systemd/nametap.tmpfiles '$(DESTDIR)$(LIBDIR)/tmpfiles.d/nametap.conf'
	test -e '$(DESTDIR)/etc/default/nametap' || \
	install -D -m 644 deploy/systemd/nametap.default  '$(DESTDIR)/etc/default/nametap'
	@echo 'Now edit /etc/default/nametap, then run: systemd-sysusers nametap.conf && systemd-tmpfiles --create nametap.conf && \'
	@echo '  systemctl daemon-reload && systemctl enable --now nametap.socket nametap.service'

clean:
	rm -rf bin coverage.*out
