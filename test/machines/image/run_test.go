package image

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// The name and the address belong to a Service in examples/shop. The nameserver does not exist:
// rules redirect queries for it to the agent.
const (
	meshName   = "redis.data.svc.cluster.local."
	meshIP     = "10.96.20.10"
	nameserver = "192.0.2.53"
)

// run runs the images as a pod does, in a network namespace: the control plane, the agent, and the init container.
// A client's query for a mesh name, which it sends to a nameserver, is answered by the agent.
func run(t *testing.T, dir string, images map[string]Image) {
	t.Helper()
	host := netns.New(t)
	host.Exec("ip", "address", "add", "192.0.2.2/24", "dev", "lo")

	discovery := newContainer(t, filepath.Join(dir, "discovery"), images["discovery"])
	if err := os.CopyFS(filepath.Join(discovery.dir, "config"), os.DirFS(filepath.Join(root, "examples/shop"))); err != nil {
		t.Fatal(err)
	}
	discovery.start(host, "--config-dir", "/config")
	agent := newContainer(t, filepath.Join(dir, "agent"), images[""])
	settings := []string{"NAMETAP_XDS_ADDR=127.0.0.1:15010", "NAMETAP_XDS_PLAINTEXT=true", "POD_NAMESPACE=shop", "NAMETAP_CAPTURE_WAIT=50s"}
	agent.env = append(agent.env, settings...)
	agent.start(host, agent.config.Cmd...)

	capture := newContainer(t, filepath.Join(dir, "init"), images["init"])
	capture.env = append(capture.env, settings...)
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	defer cancel()
	apply := capture.command(ctx, capture.config.Cmd...)
	log := capture.log(apply)
	if err := host.Start(apply); err != nil {
		t.Fatal(err)
	}
	if err := apply.Wait(); err != nil {
		t.Fatalf("%v: %v\n%s%s", apply, err, read(t, log), agent.said())
	}
	if rules := host.Rules(); !strings.Contains(rules, "REDIRECT") {
		t.Errorf("the init container has set the rules\n%s", rules)
	}
	got := ""
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s has %s\n%s%s", meshName, got, agent.said(), discovery.said())
		}
	})
	wait.Until(t, "the agent answers", func() bool {
		var err error
		if got, err = lookup(host); err != nil {
			got = err.Error()
		}
		return got == meshIP
	})
}

// lookup sends a query of a client, and returns the address.
func lookup(host *netns.NS) (string, error) {
	var conn net.Conn
	var err error
	host.Run(func() { conn, err = net.Dial("udp", nameserver+":53") })
	if err != nil {
		return "", err
	}
	defer conn.Close()
	client := &dns.Client{Timeout: 5 * time.Second}
	reply, _, err := client.ExchangeWithConn(new(dns.Msg).SetQuestion(meshName, dns.TypeA), &dns.Conn{Conn: conn})
	if err != nil {
		return "", err
	}
	for _, record := range reply.Answer {
		if a, ok := record.(*dns.A); ok {
			return a.A.String(), nil
		}
	}
	return "", fmt.Errorf("the response is\n%v", reply)
}

// A container has the files of an image, and what an engine adds.
type container struct {
	t      *testing.T
	dir    string
	config Config
	env    []string
	output string // the file with its log
}

func newContainer(t *testing.T, dir string, image Image) *container {
	t.Helper()
	c := &container{t: t, dir: dir, config: image.Config, env: image.Config.Env, output: dir + ".log"}
	for _, name := range []string{"", "proc", "etc"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := image.Unpack(dir); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"resolv.conf": "nameserver " + nameserver + "\n", "hosts": "127.0.0.1 localhost\n"} {
		if err := os.WriteFile(filepath.Join(dir, "etc", name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// command returns a command that runs the image's program with arguments, as the image's user.
func (c *container) command(ctx context.Context, args ...string) *exec.Cmd {
	user := c.config.User
	if user == "" {
		user = "0:0"
	}
	const script = `mount --bind /proc "$1/proc"
root=$1 user=$2
shift 2
exec chroot --userspec="$user" --groups= "$root" "$@"`
	args = append([]string{"--mount", "--propagation=private", "sh", "-euc", script, "sh", c.dir, user}, append(c.config.Entrypoint, args...)...)
	cmd := exec.CommandContext(ctx, "unshare", args...)
	cmd.Env = c.env
	return cmd
}

// log sends the output of a command to a file, and returns its path.
func (c *container) log(cmd *exec.Cmd) string {
	c.t.Helper()
	file, err := os.Create(c.output)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = file.Close() })
	cmd.Stdout, cmd.Stderr = file, file
	return c.output
}

// start starts the container. It ends with the test.
func (c *container) start(host *netns.NS, args ...string) {
	c.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cmd := c.command(ctx, args...)
	c.log(cmd)
	if err := host.Start(cmd); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() // killed
	})
}

// said returns the container's log.
func (c *container) said() string { return read(c.t, c.output) }

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
