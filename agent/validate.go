package agent

import (
	"errors"
	"fmt"
	"net"
	"strconv"

	"github.com/nametap/nametap/internal/statedir"
)

// Validate returns an error if a setting is wrong, whatever the state of the host. It opens no socket, and
// makes the state directory if that is required. [New] checks the same.
func (c Config) Validate() error {
	errs := []error{c.DNS.Validate(), c.XDS.Validate(), c.checkStatusAddr(), c.checkStateDir()}
	if c.Egress != nil {
		errs = append(errs, c.Egress.Validate())
	}
	return errors.Join(errs...)
}

// checkStatusAddr returns an error unless the status address is a host and a port.
func (c *Config) checkStatusAddr() error {
	_, port, err := net.SplitHostPort(c.StatusAddr)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return fmt.Errorf("status address %q: want host:port (--status-addr): %w", c.StatusAddr, err)
	}
	return nil
}

// checkStateDir returns an error if the state directory is required and cannot be used.
func (c *Config) checkStateDir() error {
	if !c.StateDirRequired || c.XDS.StateDir == "" {
		return nil
	}
	if err := statedir.Check(c.XDS.StateDir); err != nil {
		return fmt.Errorf("state directory %q: want a writable directory that exists or can be created (--state-dir): %w", c.XDS.StateDir, err)
	}
	return nil
}
