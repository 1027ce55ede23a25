package guard

import (
	"os"

	"golang.org/x/sys/unix"
)

// drainLimit bounds what is dropped from one socket. Nothing is redirected to it any more.
const drainLimit = 1 << 16

// drain drops the packets and connections that wait in sockets. Otherwise they would make systemd
// start the agent again that was just stopped. The clients send their queries again, and reach
// nameservers.
func drain(sockets []*os.File) {
	for _, socket := range sockets {
		fd := int(socket.Fd()) //nolint:gosec // a descriptor
		drop := dropPacket
		if listening, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err == nil && listening == 1 {
			drop = dropConnection
		}
		for range drainLimit {
			if !readable(fd) || drop(fd) != nil {
				break
			}
		}
	}
}

// readable reports whether a packet or a connection waits. It does not rely on the flag
// O_NONBLOCK, which all processes with the socket share.
func readable(fd int) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}} //nolint:gosec // a descriptor
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1 && fds[0].Revents&unix.POLLIN != 0
}

func dropPacket(fd int) error {
	_, _, err := unix.Recvfrom(fd, nil, unix.MSG_DONTWAIT)
	return err
}

func dropConnection(fd int) error {
	conn, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
	if err != nil {
		return err
	}
	return unix.Close(conn)
}
