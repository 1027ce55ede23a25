package test

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// withConntrackMax makes a command see another limit of conntrack, which is the same in all network namespaces.
func (h *host) withConntrackMax(limit string, cmd *exec.Cmd) *exec.Cmd {
	h.tb.Helper()
	path, err := exec.LookPath("unshare")
	if err != nil {
		h.tb.Fatal(err)
	}
	script := "mount --bind " + h.write("max", limit) + ` /proc/sys/net/netfilter/nf_conntrack_max && exec "$0" "$@"`
	cmd.Args = slices.Concat([]string{"unshare", "--mount", "sh", "-c", script, cmd.Path}, cmd.Args[1:])
	cmd.Path = path
	return cmd
}

// TestConntrackFull checks that status and `capture check` name the setting to raise when the kernel drops the
// probes of the agent because conntrack is full.
func TestConntrackFull(t *testing.T) { // K21
	t.Parallel()
	for limit, full := range map[string]bool{"1": true, "262144": false} {
		t.Run(limit, func(t *testing.T) {
			t.Parallel()
			v := newVM(t, "nft")
			v.sameUser = true
			v.Exec("iptables-nft", "-t", "nat", "-A", "OUTPUT", "-p", "tcp", "-m", "conntrack", "--ctstate", "NEW", "-j", "RETURN") // so that there are entries
			v.launchCommand(v.withConntrackMax(limit, v.command("agent", "--xds-addr", v.xds.Addr(), "--xds-plaintext",
				"--dns-addr", dnsAddr, "--status-addr", statusAddr, "--resolv-conf", v.resolvConf, "--state-dir", "")))
			wait.Until(t, "the agent is ready", func() bool { return strings.HasPrefix(v.get("/healthz/ready"), "HTTP/1.0 200") })
			v.Exec("iptables-nft", "-A", "OUTPUT", "-p", "udp", "--dport", "15053", "-j", "DROP") // as the kernel does
			var status result
			says := "udp " + dnsAddr + ": "
			if full { // which is why the listener is silent
				says = "the connection tracking of the kernel is full"
			}
			wait.Until(t, "status says: "+says, func() bool {
				status = v.nametap("status", "--status-addr", statusAddr)
				return strings.Contains(status.stdout, says)
			})
			if strings.Contains(status.stdout, "net.netfilter.nf_conntrack_max") != full {
				t.Errorf("status with a limit of %s: %s", limit, status.stdout)
			}
			check := v.withConntrackMax(limit, v.command(v.args("check")...))
			var output strings.Builder
			check.Stdout = &output
			if err := v.Start(check); err != nil {
				t.Fatal(err)
			}
			_ = check.Wait() // the agent does not answer, which is an error
			if strings.Contains(output.String(), "raise net.netfilter.nf_conntrack_max") != full {
				t.Errorf("check with a limit of %s: %s", limit, output.String())
			}
		})
	}
}
