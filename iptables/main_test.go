package iptables_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/iptables"
)

// Kernel rules are changed in network namespaces only, which these tests make:
// isolated runs a test again in a process of its own, in new ones. Other
// processes that a test needs (an agent, nameservers) are this binary too.
const (
	envOutside = "NAMETAP_TEST_OUTSIDE" // the network namespace that is not to be touched
	envPeer    = "NAMETAP_TEST_PEER"    // run as a peer
	envApply   = "NAMETAP_TEST_APPLY"   // apply rules of this backend, and end
)

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(envPeer) != "":
		runPeer()
		os.Exit(0)
	case os.Getenv(envApply) != "":
		os.Exit(applyAndEnd(iptables.Backend(os.Getenv(envApply))))
	case os.Getenv(envOutside) != "":
		if err := privateRun(); err != nil {
			fmt.Println("a private /run:", err)
			os.Exit(1)
		}
	}
	goleak.VerifyTestMain(m)
}

// privateRun gives this process a /run of its own, and with it a lock of its own.
func privateRun() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	return unix.Mount("tmpfs", "/run", "tmpfs", 0, "")
}

func applyAndEnd(backend iptables.Backend) int {
	cfg := iptables.DefaultConfig()
	cfg.Backend = backend
	capture, err := iptables.New(cfg, nil)
	if err == nil {
		err = capture.Apply(context.Background())
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

// isolated says whether the test is in namespaces of its own. If not, it runs
// the test there, and the caller returns.
func isolated(t *testing.T) bool {
	t.Helper()
	here, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	if outside := os.Getenv(envOutside); outside != "" {
		if outside == here {
			t.Fatal("this is not a network namespace that the test made")
		}
		return true
	}
	if os.Getuid() != 0 {
		t.Skip("LEFT OUT: needs root, for network namespaces")
	}
	for _, tool := range []string{"ip", "iptables-nft-restore", "iptables-legacy-restore"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("LEFT OUT: needs %s", tool)
		}
	}
	pattern := "^" + strings.ReplaceAll(regexp.QuoteMeta(t.Name()), "/", "$/^") + "$"
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", pattern, "-test.v", "-test.timeout", "120s")
	cmd.Env = append(os.Environ(), envOutside+"="+here)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		Pdeathsig:  syscall.SIGKILL,
	}
	out, err := cmd.CombinedOutput()
	if err != nil || bytes.Contains(out, []byte("LEFT OUT")) || testing.Verbose() {
		t.Logf("in namespaces of its own:\n%s", out)
	}
	if err != nil {
		t.Fatal(err)
	}
	return false
}

// matrix runs a test for both backends and families, each in its own namespaces.
func matrix(t *testing.T, test func(l *lab)) {
	t.Helper()
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		for _, family := range []iptables.Family{iptables.IPv4, iptables.IPv6} {
			t.Run(fmt.Sprintf("%s/%s", backend, family), func(t *testing.T) {
				if isolated(t) {
					test(newLab(t, backend, family))
				}
			})
		}
	}
}

// backends runs a test for both backends, each in its own namespaces, of labs
// without nameservers.
func backends(t *testing.T, test func(l *lab)) {
	t.Helper()
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) {
			if isolated(t) {
				sh(t, "ip link set lo up")
				test(&lab{t: t, backend: backend, log: new(logBuffer)})
			}
		})
	}
}

// sh runs a shell script and returns what it prints.
func sh(t *testing.T, format string, args ...any) string {
	t.Helper()
	script := fmt.Sprintf(format, args...)
	out, err := exec.CommandContext(t.Context(), "sh", "-ec", script).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", script, err, out)
	}
	return string(out)
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !condition(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 10 s: %s", what)
		}
	}
}

// saves returns what all four iptables-save print, without what changes by
// itself: dates and counters.
func saves(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	for _, tool := range []string{"iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"} {
		fmt.Fprintf(&b, "== %s\n%s", tool, normal(sh(t, "%s-save", tool)))
	}
	return b.String()
}

func normal(save string) string {
	save = regexp.MustCompile(`(?m)^#.*\n`).ReplaceAllString(save, "")
	return regexp.MustCompile(`\[\d+:\d+\]`).ReplaceAllString(save, "[0:0]")
}
