package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"

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
	if f.Needed && errors.Is(err, errMissing) {
		f.Detail += "; mode resolv of injection needs none of it"
	}
	if isAny(err, errRefused, os.ErrPermission) {
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
	for _, f := range family.All() {
		if others := istioRules(f, m); len(others) > 0 {
			findings = append(findings, Finding{What: "no other capture of DNS over " + f.String(), Detail: strings.Join(others, "; "), Advice: istioAdvice})
		}
		if len(vs[0].rules.tables(f)) == 0 {
			continue
		}
		if err := s.reason[f]; err != nil {
			findings = append(findings, Finding{What: "tools for " + f.String(), Needed: cfg.Needs(f),
				Advice: "without them DNS over " + f.String() + " is not captured"}.withResult(err))
			continue
		}
		findings = append(findings, probe(ctx, s.tools[f], vs, cfg.Needs(f))...)
	}
	return findings
}

// probe tries the variants of the rules, best first, without capturing queries: see [tryRules]. The findings name what
// this machine lacks for a better variant. needed is true if capture fails when no variant works.
func probe(ctx context.Context, t tools, vs []variant, needed bool) []Finding {
	const advice = modules + ", on RHEL 10 and kin from the package kernel-modules-extra, and install all extensions of the package iptables"
	what := fmt.Sprintf("%s rules for %s", t.backend, t.family)
	var first error
	for _, v := range vs {
		detail, err := tryRules(ctx, t, v.rules.Text(t.family))
		if err == nil {
			findings := []Finding{{What: what, OK: true, Needed: needed, Detail: detail}}
			if first != nil {
				findings = append(findings, Finding{What: what + ": " + strings.Join(v.omitted, ", "), Advice: advice + "; until then the rules are without it"}.withResult(first))
			}
			return findings
		}
		if first = cmp.Or(first, err); !errors.Is(err, errMissing) {
			break // fewer rules would fail, too, for example if a tool hangs
		}
		if lacks := lacking(ctx, t.family, t.tryElsewhere); len(lacks) > 0 {
			first = errLacks(lacks)
		}
	}
	return []Finding{Finding{What: what, Needed: needed, Advice: advice}.withResult(first)}
}

// errLacks returns the error that this machine lacks matches and targets.
func errLacks(names []string) error {
	return fmt.Errorf("%w: %s", errMissing, strings.Join(names, ", "))
}

// lacking names the matches and targets of the rules that the tool or the kernel lacks. The function try tries a rule in a
// table.
func lacking(ctx context.Context, f family.Family, try func(ctx context.Context, table, rule string) error) (names []string) {
	for _, part := range []struct{ name, table, rule string }{
		{"target REDIRECT (xt_REDIRECT)", "nat", "-p udp -j REDIRECT --to-ports 1"},
		{"match owner (xt_owner)", "nat", "-m owner --uid-owner 0 -j RETURN"},
		{"matches ttl and hl (xt_hl)", "nat", builder{family: f}.hopsMatch() + " 1 -j RETURN"},
		{"match comment (xt_comment)", "nat", "-m comment --comment x -j RETURN"},
		{"target CT (xt_CT)", "raw", fmt.Sprintf("-j CT --zone-orig %d", zone)},
		{"match recent (xt_recent)", "raw", recent(f, leaseAlive) + " -j RETURN"},
		{"match conntrack (xt_conntrack)", filterTable, "-m conntrack --ctstate DNAT -j RETURN"},
		{"target REJECT (ipt_REJECT, ip6t_REJECT)", filterTable, "-p tcp -j REJECT --reject-with tcp-reset"},
	} {
		if errors.Is(try(ctx, part.table, part.rule), errMissing) {
			names = append(names, part.name)
		}
	}
	return names
}

// tryElsewhere tries a rule in a new network namespace.
func (t tools) tryElsewhere(ctx context.Context, table, rule string) error {
	_, err := tryRules(ctx, t, fmt.Sprintf("*%s\n-A OUTPUT %s\nCOMMIT\n", table, rule))
	return err
}

// tryHere tries a rule in a chain to which no rule jumps.
func (t tools) tryHere(ctx context.Context, table, rule string) error {
	const chain = ownPrefix + "TRY"
	err := t.write(ctx, fmt.Sprintf("*%s\n:%s - [0:0]\n-A %[2]s %[3]s\nCOMMIT\n", table, chain, rule))
	_ = t.write(ctx, fmt.Sprintf("*%s\n-F %s\n-X %[2]s\nCOMMIT\n", table, chain)) // there is none if the first has failed
	return err
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
	_, err := conntrack.List(family.IPv4.Number(), func(conntrack.Entry) bool { return false })
	return Finding{What: "conntrack over netlink",
		Advice: "modprobe nf_conntrack_netlink; without it, sockets that were used before may bypass the agent until they are closed"}.withResult(err)
}

// istioRules describes the rules of Istio for port 53, of one family in both backends: nametap's come before them. The tools
// of iptables do not show those that istio-cni makes with nft.
func istioRules(f family.Family, m machine) (found []string) {
	add := func(where string) {
		if text := "Istio's rules capture port 53 too: " + where; !slices.Contains(found, text) {
			found = append(found, text)
		}
	}
	for _, s := range []*side{m.nft, m.legacy} {
		for _, name := range tableNames() {
			for _, r := range s.saved[f][name].rules {
				if strings.HasPrefix(r.chain, "ISTIO_") && valueOf(words(r.spec), "--dport") == "53" {
					add(fmt.Sprintf("%s, table %s, chain %s", s.backend, name, r.chain))
				}
			}
		}
	}
	const ambient, inet = "istio-ambient-nat", 1 // the kernel's number of the family inet
	if askNFTTable(inet, ambient) == nil {
		add("nft table inet " + ambient)
	}
	return found
}

// istioAdvice is the advice if Istio has rules for port 53.
const istioAdvice = "use only one of the two: set ISTIO_META_DNS_CAPTURE to \"false\" for Istio's agent, or run no nametap in this pod. " +
	"In ambient mode, start the pod again with the annotation ambient.istio.io/dns-capture: \"false\": rules of istio-cni that are made with nft send the agent's own queries to ztunnel, or back to the agent"
