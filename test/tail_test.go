package test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/leftout"
	"github.com/nametap/nametap/internal/testkit/netns"
)

// unitDir makes a cgroup for a unit and returns its directory. It skips the test where there is no cgroup v2.
func unitDir(t *testing.T, unit string) string {
	t.Helper()
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var stat unix.Statfs_t
		if unix.Statfs(root, &stat) != nil || stat.Type != unix.CGROUP2_SUPER_MAGIC {
			continue
		}
		dir := filepath.Join(root, unit)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			leftout.Test(t, "the units of clients: %v", err)
		}
		t.Cleanup(func() { _ = os.Remove(dir) }) // its processes have ended
		return dir
	}
	leftout.Test(t, "the units of clients, there is no cgroup v2")
	return ""
}

// digAs runs dig as a user and in a cgroup.
func (h *host) digAs(uid uint32, dir *os.File, args ...string) {
	h.tb.Helper()
	cmd := exec.Command("dig", append([]string{"+tries=1", "+timeout=5"}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}, UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	err := h.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		h.tb.Fatalf("%v: %v", cmd, err)
	}
}

// The unit and the user of a captured client are found, over UDP and TCP, whether the agent may look up original
// destinations or not, and after the unit has ended.
func TestTailClients(t *testing.T) { // R13
	t.Parallel()
	netns.Need(t, "iptables", "dig")
	for name, capabilities := range map[string][]uintptr{"CAP_NET_ADMIN": {capNetAdmin}, "no capability": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			h.capabilities = capabilities
			h.named.Handle(fakedns.Rcode(dns.RcodeServerFailure))
			h.start()
			h.redirect()
			unit := fmt.Sprintf("nametap-test-%d-%d.service", os.Getpid(), len(capabilities))
			dir, err := os.Open(unitDir(t, unit))
			if err != nil {
				t.Fatal(err)
			}
			want := map[string]uint32{}
			for i, over := range []string{"+notcp", "+tcp"} {
				uid := uint32(4000 + i)
				question := fmt.Sprintf("%d.example.org", i)
				h.digAs(uid, dir, over, "@"+named, question)
				want[question+"."] = uid
			}
			_ = dir.Close()
			r := h.nametap("tail", "--no-follow", "-o", "json", "--client", unit, "--status-addr", statusAddr)
			found := map[string]uint32{}
			for line := range strings.Lines(r.stdout) {
				var record seen.Record
				if err := json.Unmarshal([]byte(line), &record); err != nil {
					t.Fatal(err)
				}
				if record.UID == nil || record.Unit != unit || record.Rcode != "SERVFAIL" {
					t.Errorf("%+v", record)
					continue
				}
				found[record.Name] = *record.UID
			}
			if fmt.Sprint(found) != fmt.Sprint(want) {
				t.Errorf("%d %s: users by name %v, want %v\n%s", r.code, r.stderr, found, want,
					h.nametap("tail", "--no-follow", "--status-addr", statusAddr).stdout)
			}
		})
	}
}
