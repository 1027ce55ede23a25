// Package guard removes the capture rules when the agent that they redirect to does not come
// back.
//
// With the sockets of the agent held by systemd, rules may outlive the process: queries wait in
// the sockets for the next one. Something has to remove the rules if there is no next one. It
// cannot be part of the agent's unit, because systemd ends all of its processes with it, and it
// cannot be a command that systemd starts then, because the program may be what is missing. So
// the guard is a process of its own, which runs as long as the agent is wanted.
//
//  1. An agent connects to the guard when it starts, and sends signs of life until its listeners
//     answer. Then it tells the guard that it answers. At its end it sends signs of life again,
//     or tells the guard that it has removed its rules.
//     An agent that answers sends none: the end of its connection tells when it dies, and a busy
//     machine must not make it look dead.
//  2. If for Patience no agent has answered and none has given a sign of life, the guard removes
//     the rules. It retries a removal that fails.
//  3. Signs of life count for StartTime, and no longer once the process has died, so that a
//     process that dies at each start does not keep the rules.
//  4. While the guard removes rules it does not answer, and agents install rules only after its
//     answer.
//  5. When the guard ends and no agent answers, it removes the rules, and drops what waits in the
//     sockets of the agent. If systemd has lost them, because nametap.socket was changed and not
//     restarted, the next agent opens its own, and the guard closes what it has of the previous ones.
//
// The agent tells the guard whether its rules are to be removed (fail open), and its network
// namespace. An agent in another namespace is refused.
package guard
