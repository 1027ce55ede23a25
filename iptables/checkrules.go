package iptables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"

	goiptables "github.com/coreos/go-iptables/iptables"
	"golang.org/x/sys/unix"
)

// Check uses github.com/coreos/go-iptables for the version of a tool and to look for single
// rules. Everything else runs the tools itself, since go-iptables 0.8.0
//
//   - finds iptables in $PATH, but neither the tools of one backend beside those of the other
//     nor those in /usr/sbin that are not in $PATH;
//   - does not return the mode (nft or legacy) that it reads;
//   - does not restore or save, and has no way to read a table without creating it in legacy;
//   - runs tools without a time limit, in the language of the user, and with a lock file that
//     cannot be replaced where /run is read-only;
//   - reports a missing chain or table as a missing rule.

// goLockWait is lockWait for go-iptables.
const goLockWait = 5

// oldestTool is the first version whose iptables-restore waits for the lock (-w).
func oldestTool() []int { return []int{1, 6, 2} }

// checkInstalled returns the version of a family's tool and, if rules of nametap are
// installed, whether the tool finds each of them.
func checkInstalled(ctx context.Context, p place, have saved, vs []variant) []Finding {
	ctx, cancel := context.WithTimeout(ctx, p.tools.limit)
	defer cancel()
	protocol := goiptables.ProtocolIPv4
	if p.family == IPv6 {
		protocol = goiptables.ProtocolIPv6
	}
	path := strings.TrimSuffix(p.tools.restore, "-restore")
	var tool *goiptables.IPTables
	err := limited(ctx, func() (err error) {
		tool, err = goiptables.New(goiptables.Path(path), goiptables.IPFamily(protocol), goiptables.Timeout(goLockWait))
		return err
	})
	found := Finding{What: "tools for " + p.family.String(), Advice: "install the package iptables, version 1.6.2 or later"}
	if err != nil {
		return []Finding{found.after(fmt.Errorf("the version of %s is not known: %w", path, err))}
	}
	major, minor, patch := tool.GetIptablesVersion()
	found.Detail = fmt.Sprintf("%s is version %d.%d.%d", path, major, minor, patch)
	if slices.Compare([]int{major, minor, patch}, oldestTool()) < 0 {
		found.Needed, err = true, errors.New(found.Detail)
	}
	findings := []Finding{found.after(err)}
	if have.hasOwn() && (p.backend != Legacy || replacementLock() == "") {
		findings = append(findings, ruleCheck{tool, p.family, have}.run(ctx, installedVariant(p.family, have, vs)))
	}
	return findings
}

// installedVariant returns the variant that is installed, or else the best one.
func installedVariant(f Family, have saved, vs []variant) variant {
	for _, v := range vs {
		if len(v.rules.drift(f, have)) == 0 {
			return v
		}
	}
	return vs[0]
}

// A ruleCheck looks for single rules of a family.
type ruleCheck struct {
	tool   *goiptables.IPTables
	family Family
	have   saved
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
			err := limited(ctx, func() (err error) {
				if c.have[t.name] != nil { // -C would create a table of legacy
					exists, err = c.tool.Exists(t.name, r.chain, arguments(r.spec)...)
				}
				return err
			})
			if err != nil {
				return finding.after(fmt.Errorf("checking rule %q: %w", r.spec, err))
			}
			if !exists {
				missing = append(missing, fmt.Sprintf("%s: -A %s %s", t.name, r.chain, r.spec))
			}
		}
	}
	if len(missing) > 0 {
		return finding.after(fmt.Errorf("%d of %d are missing: %s", len(missing), total, strings.Join(missing, ", ")))
	}
	finding.Detail = fmt.Sprintf("all %d are in the kernel", total)
	return finding.after(nil)
}

// all returns the rules of a table, the jumps included.
func (t table) all() []savedRule {
	var all []savedRule
	for _, c := range t.chains {
		for _, spec := range c.jumps {
			all = append(all, savedRule{chain: c.parent, spec: spec})
		}
		for _, spec := range c.rules {
			all = append(all, savedRule{chain: c.name, spec: spec})
		}
	}
	return all
}

// arguments returns a rule as arguments of a program.
func arguments(spec string) []string {
	args := words(spec)
	for i := range args {
		args[i] = strings.Trim(args[i], `"`)
	}
	return args
}

// limited calls a function that runs tools one after the other, and kills the tool that
// runs when ctx ends: go-iptables waits for a tool forever. The function must not run tools
// in other goroutines.
func limited(ctx context.Context, f func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	killed := make(chan struct{})
	children := fmt.Sprintf("/proc/self/task/%d/children", unix.Gettid()) // of this thread
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
		<-killed // or it would kill what the thread runs next
	}
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}
