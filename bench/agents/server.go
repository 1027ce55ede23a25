package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/nametap/nametap/bench/lab"
)

// A server is a process of a control plane.
type server struct {
	addr, status string // the addresses of ADS and of HTTP; status is empty for a target
	pid          int
	process      *lab.Process  // nil for a target
	before       time.Duration // processor time of earlier processes
}

// startLimit is how long a control plane may take to be ready.
const startLimit = 2 * time.Minute

// newServer returns a server with free addresses, without a process.
func newServer(ctx context.Context) (*server, error) {
	addr, err := lab.FreeAddr(ctx)
	if err != nil {
		return nil, err
	}
	status, err := lab.FreeAddr(ctx)
	return &server{addr: addr.String(), status: status.String()}, err
}

// start starts a nametap-discovery, and returns when it is ready.
func (b *bench) start(ctx context.Context, s *server) error {
	binary := b.binary
	var err error
	if binary == "" {
		binary, err = b.lab.Build(ctx, "..", "cmd/nametap-discovery")
	} else {
		binary, err = filepath.Abs(binary)
	}
	if err != nil {
		return fmt.Errorf("nametap-discovery: %w (-discovery)", err)
	}
	argv := []string{binary, "--kubeconfig=" + b.lab.Path("kubeconfig"), "--http-addr=" + s.status,
		"--max-clients=1000000", "--max-clients-per-address=1000000", // all agents have one address, and may have one namespace
	}
	if b.certificates != nil {
		argv = append(argv, b.certificates.flags(s.addr)...)
	} else {
		argv = append(argv, "--grpc-addr="+s.addr)
	}
	if s.process, err = b.lab.Start(ctx, lab.Command{Name: "nametap-discovery", Argv: argv}); err != nil {
		return err
	}
	s.pid = s.process.Pid
	return s.process.Await(ctx, startLimit, s.ready)
}

// ready returns an error while the server is not ready.
func (s *server) ready(ctx context.Context) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.status+"/healthz/ready", http.NoBody)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close() // it is not read
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("status %s", response.Status)
	}
	return nil
}

// end ends the process.
func (b *bench) end(s *server) {
	if used, err := s.processor(); err == nil {
		s.before = used
	}
	b.lab.Stop(s.process)
	s.process, s.pid = nil, 0
}

// processor returns the processor time of the server, user and system.
func (s *server) processor() (time.Duration, error) {
	if s.pid == 0 {
		return s.before, nil
	}
	used, err := lab.ProcessorClock(lab.ClockOf(s.pid))
	return s.before + used, err
}

// A memory is the memory of a process, in bytes.
type memory struct{ resident, anonymous int }

// memory returns the memory of the server.
func (s *server) memory() (m memory, err error) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(s.pid), "smaps_rollup"))
	if err != nil {
		return m, fmt.Errorf("reading the memory of a server: %w", err)
	}
	if m.resident, err = lab.ParseSize(string(text), "Rss"); err != nil {
		return m, err
	}
	m.anonymous, err = lab.ParseSize(string(text), "Anonymous")
	return m, err
}
