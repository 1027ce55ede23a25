package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// notFound is the result of a name without addresses.
const notFound = "no such host"

// A client is a process in a network namespace of its own, which resolves names as any program in Go does. It reads
// what to do, an action and a name in a line, and writes a line with the result.
type client struct {
	input  io.Writer
	output *bufio.Reader
}

// startClient starts a client and connects it to this network namespace.
func startClient(ctx context.Context, resolvConf string) (*client, error) {
	cmd := self(ctx, clientCommand, resolvConf)
	cmd.SysProcAttr.Cloneflags, cmd.SysProcAttr.Unshareflags = syscall.CLONE_NEWNET, syscall.CLONE_NEWNS
	input, inputErr := cmd.StdinPipe()
	output, outputErr := cmd.StdoutPipe()
	if err := cmp.Or(inputErr, outputErr); err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting a client: %w", err)
	}
	c := &client{input: input, output: bufio.NewReader(output)}
	if err := ip(ctx, fmt.Sprintf("link add %s type veth peer name eth0 netns %d", hostInterface, cmd.Process.Pid),
		"address add "+hostAddr+"/24 dev "+hostInterface, "link set "+hostInterface+" up"); err != nil {
		return nil, err
	}
	if result, err := c.do("connect", "eth0"); err != nil || result != "" {
		return nil, fmt.Errorf("connecting a client: %s: %w", result, err)
	}
	return c, nil
}

// do makes the client do something, and returns the result.
func (c *client) do(action, name string) (string, error) {
	_, err := fmt.Fprintln(c.input, action, name)
	result, readErr := c.output.ReadString('\n')
	return strings.TrimSuffix(result, "\n"), cmp.Or(err, readErr)
}

// runClient is `nametap-demo client`. It ends with its input.
func runClient(ctx context.Context, resolvConf string) error {
	text, err := os.ReadFile(resolvConf)
	if err == nil { // The directory /etc of this process alone has this resolv.conf.
		err = unix.Mount("tmpfs", "/etc", "tmpfs", 0, "")
	}
	if err == nil {
		err = os.WriteFile("/etc/resolv.conf", text, readable)
	}
	if err != nil {
		return fmt.Errorf("giving the client its resolv.conf: %w", err)
	}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		action, name, _ := strings.Cut(lines.Text(), " ")
		result, err := map[string]func(ctx context.Context, name string) (string, error){
			"connect": connect, "resolve": resolve, "visit": visit,
		}[action](ctx, name)
		if err != nil {
			result = strings.ReplaceAll(err.Error(), "\n", "; ")
		}
		fmt.Println(result)
	}
	return nil
}

// connect sets up the client's interface.
func connect(ctx context.Context, name string) (string, error) {
	return "", ip(ctx, "link set lo up", "address add "+clientAddr+"/24 dev "+name, "link set "+name+" up",
		"route add default via "+hostAddr)
}

// resolve returns the addresses of a name.
func resolve(ctx context.Context, name string) (string, error) {
	addrs, err := net.DefaultResolver.LookupHost(ctx, name)
	if failure, ok := errors.AsType[*net.DNSError](err); ok && failure.IsNotFound {
		return notFound, nil
	}
	slices.Sort(addrs)
	return strings.Join(addrs, ", "), err
}

// visit connects to the database of that name, and returns its address and what it says.
func visit(ctx context.Context, name string) (string, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp4", net.JoinHostPort(name, databasePort))
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	text, err := io.ReadAll(conn)
	return fmt.Sprintf("%s: %s", conn.RemoteAddr(), text), err
}

// ip runs the command ip with each of the arguments.
func ip(ctx context.Context, arguments ...string) error {
	for _, a := range arguments {
		output, err := exec.CommandContext(ctx, "ip", strings.Fields(a)...).CombinedOutput() //nolint:gosec // constants
		if err != nil {
			return fmt.Errorf("ip %s: %w: %s", a, err, strings.TrimSpace(string(output)))
		}
	}
	return nil
}
