package lab

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/netns"
)

// Main runs the tests of a package. Without root and the commands that they need it fails, and says what is missing.
// The caller passes the result to os.Exit.
func Main(m *testing.M, commands ...string) int {
	var missing []string
	if os.Geteuid() != 0 {
		missing = append(missing, "root: run `make` as root, with Go in root's PATH")
	}
	for _, command := range commands {
		if _, err := exec.LookPath(command); err != nil {
			missing = append(missing, "the command "+command+", which `make` installs on Debian")
		}
	}
	if len(missing) > 0 {
		fmt.Fprintf(os.Stderr, "the tests need\n\t%s\n", strings.Join(missing, "\n\t"))
		return 1
	}
	_ = removeCgroups(ended) // another test may be removing them
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		<-interrupted
		_ = removeCgroups(own) // a later test removes what is left
		os.Exit(1)
	}()
	defer programs.Remove()
	return m.Run()
}

// patience is how long a test waits for programs that need a while: the API server needs a minute on a busy machine, and
// kubelet looks at some files once in a minute.
const patience = 5 * time.Minute

// Until is like [wait.Until] for what may take minutes. It leaves the processor to what it waits for.
func Until(tb testing.TB, what string, condition func() bool) {
	tb.Helper()
	for limit := time.Now().Add(patience); !condition(); {
		if time.Now().After(limit) {
			tb.Fatalf("timed out waiting: %s", what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// A Place is where programs run: a network namespace, and a directory with their files and logs.
type Place struct {
	*netns.NS
	TB  testing.TB
	Dir string
	// Runtime is the directory of the agent's private socket; Dir if it is empty.
	Runtime string
	// enter is a command and its first arguments, after which the rest is a command that runs in the place. Without it,
	// commands are in the namespace of the network alone.
	enter []string
}

// NewPlace makes a place. Its directory is kept if the test fails.
func NewPlace(tb testing.TB) *Place {
	tb.Helper()
	dir, err := os.MkdirTemp("", "nt-lab-") //nolint:usetesting // it stays if the test fails
	if err == nil {
		err = os.Chmod(dir, 0o755) // the agent is another user
	}
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if tb.Failed() {
			tb.Logf("the logs are in %s", dir)
		} else if err := os.RemoveAll(dir); err != nil {
			tb.Error(err)
		}
	})
	return &Place{NS: netns.New(tb), TB: tb, Dir: dir}
}

// Beside makes a place whose directory is in the directory of this one.
func (p *Place) Beside(name string) *Place {
	p.TB.Helper()
	return &Place{NS: netns.New(p.TB), TB: p.TB, Dir: p.Mkdir(name, 0)}
}

// In returns the place for a subtest.
func (p *Place) In(tb testing.TB) *Place {
	tb.Helper()
	in := *p
	in.TB = tb
	return &in
}

// Path returns the path of a file of the place.
func (p *Place) Path(name string) string { return filepath.Join(p.Dir, name) }

// Mkdir makes a directory of a user, if it is missing, and returns its path.
func (p *Place) Mkdir(name string, uid int) string {
	p.TB.Helper()
	path := p.Path(name)
	err := os.MkdirAll(path, 0o755)
	if err == nil {
		err = os.Chown(path, uid, uid)
	}
	if err != nil {
		p.TB.Fatal(err)
	}
	return path
}

// Write replaces a file of the place as kubelet does, by a rename, and returns its path.
func (p *Place) Write(name, text string) string {
	p.TB.Helper()
	path := p.Path(name)
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil {
		err = os.WriteFile(path+".new", []byte(text), 0o644)
	}
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		p.TB.Fatal(err)
	}
	return path
}

// Read returns the text of a file of the place, or of an absolute path.
func (p *Place) Read(name string) string {
	p.TB.Helper()
	if !filepath.IsAbs(name) {
		name = p.Path(name)
	}
	text, err := os.ReadFile(name)
	if err != nil {
		p.TB.Fatal(err)
	}
	return string(text)
}

// Command returns a command that runs in the place once [netns.NS.Start] or Spawn has started it.
func (p *Place) Command(ctx context.Context, args ...string) *exec.Cmd {
	args = append(append([]string{}, p.enter...), args...)
	return exec.CommandContext(ctx, args[0], args[1:]...)
}

// Try runs a command in the place with an input and more environment, and returns its standard output, and both outputs
// with an error.
func (p *Place) Try(input string, env []string, args ...string) (string, error) {
	// Cleanup functions run after the end of the test's context.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(p.TB.Context()), patience)
	defer cancel()
	var stdout, stderr strings.Builder
	cmd := p.Command(ctx, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &stdout, &stderr
	err := p.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		return stdout.String() + stderr.String(), err
	}
	return stdout.String(), nil
}

// Dial connects to an address from the place.
func (p *Place) Dial(ctx context.Context, network, addr string) (conn net.Conn, err error) {
	p.Run(func() { conn, err = (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, network, addr) })
	return conn, err
}

// Get returns the answer of a web server that the place reaches; the status is 0 without one.
func (p *Place) Get(url string) (status int, body string) {
	client := http.Client{Timeout: time.Minute, Transport: &http.Transport{DialContext: p.Dial, DisableKeepAlives: true}}
	response, err := client.Get(url)
	if err != nil {
		return 0, err.Error()
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, err.Error()
	}
	return response.StatusCode, string(text)
}

// Metric returns the sum of the values of a metric of a status address, over all labels; -1 if there is none.
func (p *Place) Metric(status, name string) float64 {
	_, text := p.Get("http://" + status + "/metrics")
	sum, found := 0.0, false
	for line := range strings.Lines(text) {
		series, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if family, _, _ := strings.Cut(series, "{"); family != name {
			continue
		}
		if number, err := strconv.ParseFloat(value, 64); err == nil {
			sum, found = sum+number, true
		}
	}
	if !found {
		return -1
	}
	return sum
}
