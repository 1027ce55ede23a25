package iptables

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"

	goiptables "github.com/coreos/go-iptables/iptables"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/conntrack"
	"github.com/nametap/nametap/internal/family"
)

// A Finding says whether this machine has one of the things that capture needs or can use.
type Finding struct {
	What string `json:"what"`
	OK   bool   `json:"ok"`
	// Needed is true if nothing can be captured without this thing.
	Needed bool `json:"needed"`
	// Detail describes what was found, or what is wrong.
	Detail string `json:"detail,omitempty"`
	// Advice says how to get what is missing.
	Advice string `json:"advice,omitempty"`
}

// withResult returns the finding with err, the result of a test. If err is nil, OK is true. Otherwise Detail is the
// text of err.
func (f Finding) withResult(err error) Finding {
	if f.OK = err == nil; f.OK {
		f.Advice = ""
	} else {
		f.Detail = err.Error()
	}
	if errors.Is(err, errPermission) || errors.Is(err, os.ErrPermission) {
		f.Advice = "run this as root, or with the capabilities above, in the user namespace that owns the network namespace"
	}
	return f
}

// checkMachine lists what this machine has and lacks for a configuration and the variants of its rules.
func checkMachine(ctx context.Context, cfg Config, vs []variant) []Finding {
	findings := []Finding{
		capability("CAP_NET_ADMIN", unix.CAP_NET_ADMIN, true),
		capability("CAP_NET_RAW", unix.CAP_NET_RAW, cfg.Backend == Legacy), // nft does not need it
		// The list of legacy's tables in /proc, and legacy's lock, belong to root.
		capability("CAP_DAC_READ_SEARCH", unix.CAP_DAC_READ_SEARCH, cfg.Backend == Legacy && os.Getuid() != 0),
		Finding{What: "uid and gid", Needed: true, Detail: "exist in this user namespace",
			Advice: "run the agent as a user that this user namespace maps (/proc/self/uid_map, /proc/self/gid_map)"}.withResult(checkMapped(cfg)),
		checkConntrack(),
	}
	m := inspectAll(ctx, cfg)
	s, reason, err := m.choose(cfg.Backend)
	findings = append(findings, Finding{What: "backend", Needed: true, Detail: reason,
		Advice: "install the package iptables, and run this with CAP_NET_ADMIN in the network namespace"}.withResult(err))
	if err != nil {
		return findings
	}
	findings[len(findings)-1].Detail = fmt.Sprintf("%s: %s", s.backend, reason)
	findings = append(findings, checkRoutes(ctx, cfg)...)
	findings = append(findings, checkOthers(m.nft, m.legacy)...)
	for _, f := range family.All() {
		if len(vs[0].rules.tables(f)) == 0 {
			continue
		}
		if err := s.reason[f]; err != nil {
			findings = append(findings, Finding{What: "tools for " + f.String(), Needed: cfg.Needs(f),
				Advice: "without them DNS over " + f.String() + " is not captured"}.withResult(err))
			continue
		}
		findings = append(findings, checkInstalled(ctx, s.place(f, 1), s.saved[f], vs)...)
		findings = append(findings, probe(ctx, s.place(f, 1), vs, cfg.Needs(f))...)
	}
	return findings
}

// probe tries the variants of the rules, best first, without capturing queries: see [tryRules]. The findings list
// the parts that the first working variant leaves out. needed is true if capture fails when no variant works.
func probe(ctx context.Context, p place, vs []variant, needed bool) []Finding {
	what := fmt.Sprintf("%s rules for %s", p.backend, p.family)
	var first error
	for _, v := range vs {
		detail, err := tryRules(ctx, p.tools, v.rules.Text(p.family))
		if err != nil {
			if first == nil {
				first = err
			}
			if failsAgain(err) && !isAny(err, errExtension, errNoTable) {
				break // fewer rules would fail, too, for example if a tool hangs
			}
			continue
		}
		findings := []Finding{{What: what, OK: true, Needed: needed, Detail: detail}}
		for _, lost := range v.omitted {
			findings = append(findings, Finding{What: what + ": " + lost,
				Advice: "modprobe -a xt_CT xt_comment nf_conntrack, and install all extensions of the package iptables; until then the rules are without it"}.withResult(first))
		}
		return findings
	}
	return []Finding{Finding{What: what, Needed: needed,
		Advice: "modprobe -a nf_nat xt_REDIRECT xt_owner xt_tcpudp, and for nft nft_compat, for legacy iptable_nat and ip6table_nat"}.withResult(first)}
}

// tryRules passes a text to iptables-restore in a new network namespace. Without the permission to make a
// namespace, tryRules tests only the syntax.
func tryRules(ctx context.Context, t tools, text string) (detail string, err error) {
	ctx, cancel := context.WithTimeout(ctx, t.limit)
	defer cancel()
	err = inNewNetwork(func() error {
		_, err := t.run(ctx, []byte(text), t.restore, "--noflush", "-w", lockWait)
		return err
	})
	if !errors.Is(err, errNewNetwork) {
		return "the kernel accepts them, tried in a new network namespace", err
	}
	_, err = t.run(ctx, []byte(text), t.restore, "--test", "--noflush", "-w", lockWait)
	return "the tool accepts them; trying them in the kernel needs CAP_SYS_ADMIN", err
}

// errNewNetwork is returned if this process may not make a network namespace.
var errNewNetwork = errors.New("no new network namespace")

// inNewNetwork calls f in a new thread with a new network namespace. The namespace ends with the thread.
// Programs that f starts are in this namespace, too.
func inNewNetwork(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // without unlocking it later, so the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			result <- fmt.Errorf("%w: %w", errNewNetwork, err)
			return
		}
		result <- f()
	}()
	return <-result
}

// capability reports whether this process has a capability.
func capability(name string, bit int, needed bool) Finding {
	const advice = "add it to the container's securityContext.capabilities, or run as root in the namespace's own user namespace"
	var err error
	if !capable(bit) {
		err = errors.New("this process does not have it")
	}
	return Finding{What: name, Needed: needed, Advice: advice}.withResult(err)
}

// checkConntrack reports whether conntrack entries can be listed. Deleting them needs CAP_NET_ADMIN.
func checkConntrack() Finding {
	err := conntrack.Dump(family.IPv4.Number(), func(conntrack.Entry) {}, conntrack.Filter{Protocol: unix.IPPROTO_UDP, DestinationPort: dnsPort})
	return Finding{What: "conntrack over netlink",
		Advice: "modprobe nf_conntrack_netlink; without it, sockets that were used before may bypass the agent until they are closed"}.withResult(err)
}

// checkRoutes reports whether programs of this host have routes to the VIPs that the rules redirect. The
// kernel looks for a route before a packet reaches the rules of OUTPUT.
func checkRoutes(ctx context.Context, cfg Config) (findings []Finding) {
	for _, p := range cfg.VIPs {
		family := family.Of(p.Addr())
		if cfg.EgressPort == 0 || !cfg.Has(family) || !hasAddress(family) {
			continue
		}
		var dialer net.Dialer
		conn, err := dialer.DialContext(ctx, "udp", netip.AddrPortFrom(p.Addr(), 1).String()) // sends nothing
		if err == nil {
			err = conn.Close()
		}
		findings = append(findings, Finding{What: "route to VIPs over " + family.String(), Detail: p.String(),
			Advice: fmt.Sprintf("ip route add %s dev lo; without a route, connections to these VIPs fail in programs of this host", p)}.withResult(err))
	}
	return findings
}

// hasAddress reports whether this host has an address of family f that other hosts can reach. Without such an
// address, the control plane sends no VIPs of the family.
func hasAddress(f family.Family) bool {
	addrs, err := net.InterfaceAddrs()
	return err != nil || slices.ContainsFunc(addrs, func(a net.Addr) bool {
		prefix, err := netip.ParsePrefix(a.String())
		return err == nil && family.Of(prefix.Addr()) == f && prefix.Addr().IsGlobalUnicast()
	})
}

// errUnmapped is the error for a uid or gid that the kernel would refuse with EINVAL.
var errUnmapped = errors.New("is not mapped in this user namespace, so no rule can name it")

// checkMapped returns an error if a uid or gid of the configuration does not exist in this
// user namespace.
func checkMapped(cfg Config) error {
	for _, m := range []struct {
		kind, file string
		ids        [][]uint32
	}{
		{"uid", "/proc/self/uid_map", [][]uint32{cfg.AgentUIDs, cfg.ExcludeUIDs}},
		{"gid", "/proc/self/gid_map", [][]uint32{cfg.AgentGIDs, cfg.ExcludeGIDs}},
	} {
		text, err := os.ReadFile(m.file)
		if err != nil {
			continue // without user namespaces there is no such file
		}
		for _, ids := range m.ids {
			for _, id := range ids {
				if !isMapped(text, id) {
					return fmt.Errorf("%s %d %w: choose one that %s lists", m.kind, id, errUnmapped, m.file)
				}
			}
		}
	}
	return nil
}

// isMapped reports whether an id is in a map of user_namespaces(7). Each line of the map describes a range of ids: the
// first id inside the user namespace, the first id outside, and how many ids there are.
func isMapped(idMap []byte, id uint32) bool {
	lines := bufio.NewScanner(bytes.NewReader(idMap))
	for lines.Scan() {
		var inside, outside, count uint64
		if n, _ := fmt.Sscan(lines.Text(), &inside, &outside, &count); n == 3 &&
			uint64(id) >= inside && uint64(id)-inside < count {
			return true
		}
	}
	return false
}

// Check uses github.com/coreos/go-iptables to find the version of a tool, and to look for single rules. For
// everything else this package runs the tools itself, because go-iptables 0.8.0
//
//   - looks only for a tool named iptables in $PATH, so it does not find the tools of both backends, and finds
//     nothing in /usr/sbin if $PATH lacks this directory;
//   - does not return the mode (nft or legacy) that it reads;
//   - does not restore or save, and has no way to read a table without creating it in legacy;
//   - runs tools without a time limit, in the language of the user, and with a lock file that
//     cannot be replaced where /run is read-only;
//   - reports a missing chain or table as a missing rule.

// goLockWait is how long go-iptables lets a tool wait for the lock, in seconds: as long as lockWait.
const goLockWait = 5

// oldestTool is the first version whose iptables-restore waits for the lock (-w).
func oldestTool() []int { return []int{1, 6, 2} }

// checkInstalled returns a finding about the version of a family's tool. If rules of nametap are installed, it also
// returns a finding about whether the tool finds each rule.
func checkInstalled(ctx context.Context, p place, inKernel saved, vs []variant) []Finding {
	ctx, cancel := context.WithTimeout(ctx, p.tools.limit)
	defer cancel()
	protocol := goiptables.ProtocolIPv4
	if p.family == family.IPv6 {
		protocol = goiptables.ProtocolIPv6
	}
	path := strings.TrimSuffix(p.tools.restore, "-restore")
	var tool *goiptables.IPTables
	err := runLimited(ctx, func() (err error) {
		tool, err = goiptables.New(goiptables.Path(path), goiptables.IPFamily(protocol), goiptables.Timeout(goLockWait))
		return err
	})
	found := Finding{What: "tools for " + p.family.String(), Advice: "install the package iptables, version 1.6.2 or later"}
	if err != nil {
		return []Finding{found.withResult(fmt.Errorf("the version of %s is not known: %w", path, err))}
	}
	major, minor, patch := tool.GetIptablesVersion()
	found.Detail = fmt.Sprintf("%s is version %d.%d.%d", path, major, minor, patch)
	if slices.Compare([]int{major, minor, patch}, oldestTool()) < 0 {
		found.Needed, err = true, errors.New(found.Detail)
	}
	findings := []Finding{found.withResult(err)}
	if inKernel.hasOwn() && (p.backend != Legacy || replacementLock() == "") {
		findings = append(findings, ruleCheck{tool, p.family, inKernel}.run(ctx, installedVariant(p.family, inKernel, vs)))
	}
	return findings
}

// installedVariant returns the variant that is installed. If no variant is installed, it returns the best variant.
func installedVariant(f family.Family, inKernel saved, vs []variant) variant {
	for _, v := range vs {
		if len(v.rules.drift(f, inKernel)) == 0 {
			return v
		}
	}
	return vs[0]
}

// A ruleCheck looks for single rules of a family.
type ruleCheck struct {
	tool     *goiptables.IPTables
	family   family.Family
	inKernel saved
}

// run looks for each rule of a variant by `iptables -C`.
func (c ruleCheck) run(ctx context.Context, v variant) Finding {
	finding := Finding{What: "installed rules for " + c.family.String(),
		Advice: "`nametap capture status` shows how the rules differ, `nametap capture apply` repairs them"}
	total := 0
	var missing []string
	for _, t := range v.rules.tables(c.family) {
		for _, r := range t.all() {
			total++
			exists := false
			err := runLimited(ctx, func() (err error) {
				if c.inKernel[t.name] != nil { // -C would create a table of legacy
					exists, err = c.tool.Exists(t.name, r.chain, arguments(r.spec)...)
				}
				return err
			})
			if err != nil {
				return finding.withResult(fmt.Errorf("checking rule %q: %w", r.spec, err))
			}
			if !exists {
				missing = append(missing, fmt.Sprintf("%s: -A %s %s", t.name, r.chain, r.spec))
			}
		}
	}
	if len(missing) > 0 {
		return finding.withResult(fmt.Errorf("%d of %d are missing: %s", len(missing), total, strings.Join(missing, ", ")))
	}
	finding.Detail = fmt.Sprintf("all %d are in the kernel", total)
	return finding.withResult(nil)
}

// arguments returns a rule as arguments of a program.
func arguments(spec string) []string {
	args := words(spec)
	for i := range args {
		args[i] = strings.Trim(args[i], `"`)
	}
	return args
}

// runLimited calls f, which runs tools one after the other. When ctx ends, runLimited kills the running tool, because
// go-iptables waits for a tool forever. f must not run tools in other goroutines.
func runLimited(ctx context.Context, f func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	killed := make(chan struct{})
	children := fmt.Sprintf("/proc/self/task/%d/children", unix.Gettid()) // the processes that this thread has started
	stop := context.AfterFunc(ctx, func() {
		defer close(killed)
		text, _ := os.ReadFile(children)
		for _, field := range strings.Fields(string(text)) {
			if pid, err := strconv.Atoi(field); err == nil {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
		}
	})
	err := f()
	if !stop() {
		<-killed // otherwise the kill could hit a program that the thread starts next
	}
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// checkOthers reports whether other programs capture port 53 too.
func checkOthers(sides ...*side) []Finding {
	var findings []Finding
	for _, s := range sides {
		for _, f := range family.All() {
			if found := istioRules(s.saved[f]); len(found) > 0 {
				advice := istioAdvice
				if hasAmbient(s.saved[f]) {
					advice = ambientAdvice
				}
				findings = append(findings, Finding{What: "no other capture of DNS over " + f.String(),
					Detail: string(s.backend) + ": " + strings.Join(found, "; "), Advice: advice})
			}
		}
	}
	if native := nativeAmbient(); native != "" {
		findings = append(findings, Finding{What: "no other capture of DNS", Detail: native, Advice: nativeAmbientAdvice})
	}
	return findings
}
